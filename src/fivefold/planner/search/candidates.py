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

from fivefold.axes.checks import possible, settings_fit
from fivefold.config.conditions import batch_splits
from fivefold.ledger.numbers import divisors
from fivefold.ledger.setup import Setup
from fivefold.planner.goal import Goal
from fivefold.planner.memory.known_activations import NUMBERS
from fivefold.planner.play.arrays import taken
from fivefold.schedules import SCHEDULES


@dataclass(frozen=True)
class Choices:
    """Which values are tried of what a planner is free to choose, by a layout's keys.

    schedule        None: all that are worth a try (`Schedule.use`)
    virtual_stages  where a schedule leaves them open
    compile         None: as the goal has it
    """

    zero: Sequence[int] = (0, 1, 2, 3)
    schedule: Sequence[str] | None = None
    recompute: Sequence[str] = ("none", "selective", "full")
    cp_kind: Sequence[str] = ("ring", "ulysses", "allgather")
    micro_batch: Sequence[int] = range(1, 17)
    virtual_stages: Sequence[int] = range(2, 9)
    compile: Sequence[bool] | None = None


EVERYTHING = Choices()


def candidates(goal: Goal, choices: Choices = EVERYTHING) -> Iterator[Setup]:
    """All layouts that are possible, by structure; those that no axis would take are left out."""
    splits = _splits(goal, choices.micro_batch)
    schedules = choices.schedule
    if schedules is None:
        schedules = [name for name, schedule in SCHEDULES.items() if schedule.use == "search"]
    compiles = choices.compile or ((False, True) if goal.may_compile else (goal.setup.compile,))
    structures = itertools.product(choices.zero, ("", *schedules), ("", *choices.cp_kind))
    for zero, schedule, cp_kind in structures:
        # `possible` would drop these as well; the sooner the fewer there are to judge.
        structure = replace(splits, zero=zero, schedule=schedule, cp_kind=cp_kind)
        structure = taken(structure, settings_fit(structure))
        stages = _stage_counts(schedule, choices.virtual_stages)
        structure = _with_each(structure, "virtual_stages", stages)
        structure = taken(structure, structure.stages <= goal.spec.layers)
        for recompute, compiled in itertools.product(choices.recompute, compiles):
            setup = replace(structure, recompute=recompute, compile=compiled)
            setup = taken(setup, possible(setup))
            if np.size(setup.pp):
                yield setup


def _splits(goal: Goal, micro_batches: Sequence[int]) -> Setup:
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
    setup = _with_each(replace(goal.setup, **columns), "micro_batch", micro_batches)
    return taken(setup, batch_splits(setup.global_batch, setup.micro_batch, setup.data_ranks))


def _stage_counts(schedule: str, tried: Sequence[int]) -> Sequence[int]:
    held = SCHEDULES[schedule].stages if schedule else 1
    return [count for count in tried if count > 1] if held is None else (held,)


def _with_each(setup: Setup, name: str, values: Sequence[int]) -> Setup:
    """Every layout with the first value of one of its numbers, then every one with the next."""
    count = np.size(setup.pp)
    rows = np.resize(np.arange(count), count * len(values))
    column: dict[str, Any] = {name: np.repeat(np.array(values, dtype=np.int64), count)}
    return replace(taken(setup, rows), **column)
