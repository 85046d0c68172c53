"""What is possible, by the rules of every axis: why a job is refused, and which of many layouts remain."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from fivefold.axes import context, data, expert, fp8, outer, pipeline, tensor
from fivefold.config import Job, conditions
from fivefold.ledger.setup import Setup
from fivefold.problems import Problem

AXES = (data, tensor, pipeline, context, expert, outer, fp8)


def check(job: Job, axes: Iterable[ModuleType] = AXES) -> list[Problem]:
    """The problems that axes have with a resolved job; empty when it can be split."""
    setup = Setup.of(job)
    broken = (rule for axis in axes for rule in axis.RULES if not rule.holds(setup))
    return [Problem(rule.key, *rule.says(setup)) for rule in broken]


def possible(setup: Setup) -> Any:
    """Whether a job with this setup can be trained; for each layout where the setup stands for many.

    A setup means exactly what it says: what `resolve` would refuse or change is not possible. The setup must
    be on a device on which its communication settings work (tp_overlap wants GPUs).
    """
    hold = settings_fit(setup) & conditions.length_fits(setup.seq_len, setup.spec.max_seq_len)
    hold = hold & conditions.batch_splits(setup.global_batch, setup.micro_batch, setup.data_ranks)
    hold = hold & conditions.experts_fit(setup.ep, setup.spec.experts)
    for rule in (rule for axis in AXES for rule in axis.RULES):
        hold = hold & rule.holds(setup)
    return hold


def settings_fit(setup: Setup) -> Any:
    """Every axis that is used has its settings, and no other has any."""
    fits = conditions.zero_fits(setup.zero, setup.dp_shard, setup.cp)
    fits = fits & conditions.overlap_fits(setup.tp_overlap, setup.tp)
    fits = fits & (setup.schedule != "" or setup.pp == 1) & (setup.cp_kind != "" or setup.cp == 1)
    for setting, axis in conditions.AXIS_OF.items():
        left_out = getattr(setup, setting) == getattr(Setup, setting)
        fits = fits & (left_out | (getattr(setup, axis) > 1))
    return fits
