"""Every way to split a job over so many devices, as a few setups of many layouts each.

Layouts that do the same operations, on tensors of different sizes, share a setup: one for each ZeRO stage,
schedule, way of recomputing and kind of context parallelism. Inside it the degrees, the micro-batch and the
number of virtual stages are arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.axes.checks import possible, settings_fit
from fivefold.axes.schedules import ONE_STAGE, V_SHAPED
from fivefold.config.conditions import batch_splits
from fivefold.ledger.numbers import divisors
from fivefold.ledger.setup import Setup
from fivefold.planner.goal import Goal

Table = dict[str, npt.NDArray[np.int64]]
"""Columns of numbers, one row a layout."""

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
NUMBERS = (*DEGREES, "micro_batch", "virtual_stages")


@dataclass(frozen=True)
class Choices:
    """Which values are tried of what a planner is free to choose.

    schedules       naive, gpipe and looped-bfs are slower than these and keep more
    most_sequences  the largest micro-batch
    most_stages     the largest number of virtual stages
    """

    zero: tuple[int, ...] = (0, 1, 2, 3)
    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")
    recompute: tuple[str, ...] = ("none", "selective", "full")
    cp_kinds: tuple[str, ...] = ("ring", "ulysses", "allgather")
    most_sequences: int = 16
    most_stages: int = 8


EVERYTHING = Choices()


def candidates(goal: Goal, choices: Choices = EVERYTHING) -> Iterator[Setup]:
    """All layouts that are possible, by structure; those that no axis would take are left out."""
    splits = _with_micro_batches(_degrees(goal), goal, choices.most_sequences)
    schedules, cp_kinds = ("", *choices.schedules), ("", *choices.cp_kinds)
    for zero, schedule, cp_kind in itertools.product(choices.zero, schedules, cp_kinds):
        structure = replace(goal.setup, zero=zero, schedule=schedule, cp_kind=cp_kind)
        table = _rows(splits, settings_fit(_with(structure, splits)))
        table = _crossed(table, "virtual_stages", _stage_counts(schedule, choices.most_stages))
        table = _rows(table, table["pp"] * table["virtual_stages"] <= goal.spec.layers)
        for recompute in choices.recompute:
            setup = replace(_with(structure, table), recompute=recompute)
            setup = chosen(setup, possible(setup))
            if len(numbers(setup)["pp"]):
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


def _degrees(goal: Goal) -> Table:
    """Every (pp, dp_replicate, dp_shard, cp, tp, ep) whose product spans the devices."""
    spec, found = goal.spec, []
    for pp in _divisors(goal.gpus, spec.layers):
        for tp in _divisors(goal.gpus // pp, spec.heads):
            for cp in _divisors(goal.gpus // pp // tp, goal.seq_len):
                dp = goal.gpus // pp // tp // cp
                if goal.global_batch % dp:
                    continue
                for shard in _divisors(dp, dp):
                    for ep in _divisors(shard * cp, spec.experts or 1):
                        found.append((pp, dp // shard, shard, cp, tp, ep))
    columns = np.array(found, dtype=np.int64).reshape(-1, len(DEGREES)).T
    return dict(zip(DEGREES, columns, strict=True))


def _with(setup: Setup, table: Table) -> Setup:
    columns: dict[str, Any] = {**table}
    return replace(setup, **columns)


def _with_micro_batches(degrees: Table, goal: Goal, most: int) -> Table:
    table = _crossed(degrees, "micro_batch", range(1, most + 1))
    data_ranks = table["dp_replicate"] * table["dp_shard"]
    return _rows(table, batch_splits(goal.global_batch, table["micro_batch"], data_ranks))


def _stage_counts(schedule: str, most: int) -> Iterable[int]:
    if not schedule or schedule in ONE_STAGE:
        return (1,)
    return (2,) if schedule in V_SHAPED else range(2, most + 1)


def _crossed(table: Table, name: str, values: Iterable[int]) -> Table:
    """Every row with the first value in a further column, then with the next."""
    column = np.repeat(list(values), len(table["pp"]))
    return {key: np.resize(numbers, len(column)) for key, numbers in table.items()} | {name: column}


def _rows(table: Table, which: npt.NDArray[np.bool_]) -> Table:
    return {name: column[which] for name, column in table.items()}


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in divisors(number) if n <= most]
