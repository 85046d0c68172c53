"""What is possible, by the rules of every axis: why a job is refused, and which of many layouts remain."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from fivefold.axes import context, data, expert, pipeline, rules, tensor
from fivefold.config import Job, conditions
from fivefold.ledger.setup import Setup
from fivefold.problems import Problem

AXES = (data, tensor, pipeline, context, expert)


def check(job: Job, axes: Iterable[ModuleType] = AXES) -> list[Problem]:
    """The problems that axes have with a resolved job; empty when it can be split."""
    setup = Setup.of(job)
    return [problem for axis in axes for problem in rules.problems(axis.RULES, setup)]


def possible(setup: Setup) -> Any:
    """Whether a job with this setup can be trained; for each layout where the setup stands for many.

    A setup means exactly what it says: what `resolve` would refuse or change is not possible. The setup must
    be on a device on which its communication settings work (tp_overlap wants GPUs).
    """
    kept = rules.possible([rule for axis in AXES for rule in axis.RULES], setup)
    kept &= conditions.length_fits(setup.seq_len, setup.spec.max_seq_len)
    kept &= conditions.batch_splits(setup.global_batch, setup.micro_batch, setup.data_ranks)
    kept &= conditions.experts_fit(setup.ep, setup.spec.experts)
    return kept & settings_fit(setup)


def settings_fit(setup: Setup) -> Any:
    """Every axis that is used has its settings, and no other has any."""
    fits = conditions.zero_fits(setup.zero, setup.dp_shard, setup.cp)
    fits = fits & conditions.overlap_fits(setup.tp_overlap, setup.tp)
    fits = fits & (setup.schedule != "" or setup.pp == 1) & (setup.cp_kind != "" or setup.cp == 1)
    for setting, axis in conditions.AXIS_OF.items():
        left_out = getattr(setup, setting) == getattr(Setup, setting)
        fits = fits & (left_out | (getattr(setup, axis) > 1))
    return fits
