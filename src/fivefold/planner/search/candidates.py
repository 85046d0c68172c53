"""Every way to split a job over so many devices, as a few setups of many layouts each.

Layouts that do the same operations, on tensors of different sizes, share a setup: one for each ZeRO stage,
schedule, way of recomputing and kind of context parallelism. Inside it the degrees, the micro-batch and the
number of virtual stages are arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.axes.checks import possible, settings_fit
from fivefold.config.conditions import batch_splits
from fivefold.ledger.numbers import divisors
from fivefold.ledger.setup import Setup
from fivefold.planner.goal import Goal
from fivefold.schedules import SCHEDULES

Table = dict[str, npt.NDArray[np.int64]]
"""Columns of numbers, one row a layout."""

NUMBERS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "micro_batch", "virtual_stages")


@dataclass(frozen=True)
class Choices:
    """Which values are tried of what a planner is free to choose.

    schedules       None: all that are worth a try (`Schedule.use`)
    most_sequences  the largest micro-batch
    most_stages     the largest number of virtual stages
    """

    zero: tuple[int, ...] = (0, 1, 2, 3)
    schedules: tuple[str, ...] | None = None
    recompute: tuple[str, ...] = ("none", "selective", "full")
    cp_kinds: tuple[str, ...] = ("ring", "ulysses", "allgather")
    most_sequences: int = 16
    most_stages: int = 8

    @property
    def schedule_names(self) -> tuple[str, ...]:
        tried = (schedule.name for schedule in SCHEDULES.values() if schedule.use == "search")
        return tuple(tried) if self.schedules is None else self.schedules


EVERYTHING = Choices()


def candidates(goal: Goal, choices: Choices = EVERYTHING) -> Iterator[Setup]:
    """All layouts that are possible, by structure; those that no axis would take are left out."""
    splits = _splits(goal, choices.most_sequences)
    schedules, cp_kinds = ("", *choices.schedule_names), ("", *choices.cp_kinds)
    for zero, schedule, cp_kind in itertools.product(choices.zero, schedules, cp_kinds):
        # `possible` would drop these as well; the sooner the fewer there are to judge.
        structure = replace(splits, zero=zero, schedule=schedule, cp_kind=cp_kind)
        structure = chosen(structure, settings_fit(structure))
        structure = _with_each(structure, "virtual_stages", _stage_counts(schedule, choices.most_stages))
        structure = chosen(structure, structure.stages <= goal.spec.layers)
        for recompute in choices.recompute:
            setup = replace(structure, recompute=recompute)
            setup = chosen(setup, possible(setup))
            if np.size(setup.pp):
                yield setup


def numbers(setup: Setup) -> Table:
    """The columns of a setup of many layouts."""
    return {name: getattr(setup, name) for name in NUMBERS}


def chosen(setup: Setup, which: Any) -> Setup:
    """The layouts of a setup that a mask or index names: of many still many, of one number a single one."""
    picked: dict[str, Any] = {name: column[which] for name, column in numbers(setup).items()}
    if np.ndim(picked["pp"]) == 0:
        picked = {name: int(value) for name, value in picked.items()}
    return replace(setup, **picked)


def _splits(goal: Goal, most_sequences: int) -> Setup:
    """Every (pp, dp_replicate, dp_shard, cp, tp, ep) that spans the devices, with every micro-batch."""
    spec, found = goal.spec, []
    for pp in divisors(goal.gpus, spec.layers):
        for tp in divisors(goal.gpus // pp, spec.heads):
            for cp in divisors(goal.gpus // pp // tp, goal.seq_len):
                dp = goal.gpus // pp // tp // cp
                if goal.global_batch % dp:
                    continue
                for shard in divisors(dp):
                    for ep in divisors(shard * cp, spec.experts or 1):
                        found.append((pp, dp // shard, shard, cp, tp, ep, 1, 1))
    table = np.array(found, dtype=np.int64).reshape(-1, len(NUMBERS))
    columns: dict[str, Any] = dict(zip(NUMBERS, table.T, strict=True))
    setup = _with_each(replace(goal.setup, **columns), "micro_batch", range(1, most_sequences + 1))
    return chosen(setup, batch_splits(setup.global_batch, setup.micro_batch, setup.data_ranks))


def _stage_counts(schedule: str, most: int) -> Sequence[int]:
    held = SCHEDULES[schedule].stages if schedule else 1
    return range(2, most + 1) if held is None else (held,)


def _with_each(setup: Setup, name: str, values: Sequence[int]) -> Setup:
    """Every layout with the first value of one of its numbers, then every one with the next."""
    count = np.size(setup.pp)
    rows = np.resize(np.arange(count), count * len(values))
    column: dict[str, Any] = {name: np.repeat(values, count)}
    return replace(chosen(setup, rows), **column)
