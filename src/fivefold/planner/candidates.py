"""Every way to split a job over so many devices, as a few setups of many layouts each.

Layouts that do the same operations, on tensors of different sizes, share a setup: one for each ZeRO stage,
schedule, way of recomputing and kind of context parallelism. Inside it the degrees, the micro-batch and the
number of virtual stages are arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.axes.candidates_check import allowed
from fivefold.ledger.setup import Setup
from fivefold.planner.goal import Goal
from fivefold.schedules import SCHEDULES

Table = dict[str, npt.NDArray[np.int64]]
"""Columns of numbers, one row a layout."""

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
NUMBERS = (*DEGREES, "micro_batch", "virtual_stages")


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


EVERYTHING = Choices()


def candidates(goal: Goal, choices: Choices = EVERYTHING) -> Iterator[Setup]:
    """All layouts that are possible, by structure; those that no axis would take are left out."""
    degrees = _degrees(goal)
    schedules = choices.schedules
    if schedules is None:
        schedules = tuple(schedule.name for schedule in SCHEDULES.values() if schedule.use == "search")
    for zero in choices.zero:
        for schedule, cp_kind in itertools.product(("", *schedules), ("", *choices.cp_kinds)):
            table = _of_structure(degrees, zero, schedule, cp_kind)
            table = _with_micro_batches(table, goal, choices.most_sequences)
            table = _with_virtual_stages(table, goal, schedule, choices.most_stages)
            if not len(table["pp"]):
                continue
            for recompute in choices.recompute:
                columns: dict[str, Any] = {**table}
                setup = replace(
                    goal.setup,
                    zero=zero,
                    schedule=schedule,
                    recompute=recompute,
                    cp_kind=cp_kind,
                    **columns,
                )
                possible = chosen(setup, allowed(setup))
                if len(numbers(possible)["pp"]):
                    yield possible


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


def _of_structure(table: Table, zero: int, schedule: str, cp_kind: str) -> Table:
    sharded = table["dp_shard"] * table["cp"] > 1
    fits = sharded if zero else table["dp_shard"] == 1
    fits = fits & ((table["pp"] > 1) == bool(schedule)) & ((table["cp"] > 1) == bool(cp_kind))
    return _rows(table, fits)


def _with_micro_batches(table: Table, goal: Goal, most: int) -> Table:
    share = goal.global_batch // (table["dp_replicate"] * table["dp_shard"])
    found = []
    for size in range(1, most + 1):
        rows = _rows(table, share % size == 0)
        found.append(rows | {"micro_batch": np.full_like(rows["pp"], size)})
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def _with_virtual_stages(table: Table, goal: Goal, schedule: str, most: int) -> Table:
    held = SCHEDULES[schedule].stages if schedule else 1
    found = []
    for count in range(2, most + 1) if held is None else (held,):
        rows = _rows(table, table["pp"] * count <= goal.spec.layers)
        found.append(rows | {"virtual_stages": np.full_like(rows["pp"], count)})
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def _rows(table: Table, which: npt.NDArray[np.bool_]) -> Table:
    return {name: column[which] for name, column in table.items()}


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in divisors(number) if n <= most]


@cache
def divisors(number: int) -> list[int]:
    """What divides a positive number, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
