"""Every way to split a job over so many devices, as a few setups of many layouts each.

Layouts that do the same operations, on tensors of different sizes, share a setup: one for each ZeRO stage,
schedule, way of recomputing and kind of context parallelism. Inside it the degrees, the micro-batch and the
number of virtual stages are arrays.

They are made in two steps: how the model is split, and how its state is spread over the data ranks. Compute
and activations depend on the first alone, so that a search bounds many layouts by one of them.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fivefold.axes.checks import possible, settings_fit
from fivefold.config.conditions import AXIS_OF, batch_splits
from fivefold.ledger.numbers import divisors
from fivefold.ledger.setup import Setup
from fivefold.planner.goal import Goal
from fivefold.planner.memory.known_activations import NUMBERS
from fivefold.planner.play.arrays import taken
from fivefold.schedules import SCHEDULES

DATA = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Choices:
    """Which values are tried of what a planner is free to choose, by a layout's keys.

    schedule        None: all that are worth a try (`Schedule.use`)
    virtual_stages  where a schedule leaves them open
    compile         None: as the goal has it
    given           keys that have one value in every layout
    """

    zero: Sequence[int] = (0, 1, 2, 3)
    schedule: Sequence[str] | None = None
    recompute: Sequence[str] = ("none", "selective", "full")
    cp_kind: Sequence[str] = ("ring", "ulysses", "allgather")
    micro_batch: Sequence[int] = range(1, 17)
    virtual_stages: Sequence[int] = range(2, 9)
    compile: Sequence[bool] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    def keep(self, setup: Setup, names: Sequence[str]) -> Any:
        """Which layouts have the given numbers, of those with these names."""
        masks = [getattr(setup, name) == self.given[name] for name in names if name in self.given]
        # Whoever says how an axis works wants the axis.
        masks += [getattr(setup, AXIS_OF[key]) > 1 for key in AXIS_OF if key in self.given]
        return functools.reduce(operator.and_, masks, np.ones(np.size(setup.pp), dtype=bool))


EVERYTHING = Choices()


def candidates(goal: Goal, choices: Choices = EVERYTHING) -> Iterator[Setup]:
    """All layouts that are possible, by structure; those that no axis would take are left out."""
    for split in model_splits(goal, choices):
        yield from data_splits(split, choices)


def model_splits(goal: Goal, choices: Choices = EVERYTHING) -> Iterator[Setup]:
    """Every way to split the model that some layout has, with its state sharded as far as may be."""
    splits = _splits(goal, choices)
    schedules = choices.schedule
    if schedules is None:
        schedules = [name for name, schedule in SCHEDULES.items() if schedule.use == "search"]
    compiles = choices.compile or ((False, True) if goal.may_compile else (goal.setup.compile,))
    for schedule, cp_kind in itertools.product(("", *schedules), ("", *choices.cp_kind)):
        # `possible` would drop these as well; the sooner the fewer there are to judge.
        structure = replace(splits, schedule=schedule, cp_kind=cp_kind)
        structure = taken(structure, _some(settings_fit, structure, choices))
        stages = _stage_counts(schedule, choices.virtual_stages)
        structure = _with_each(structure, "virtual_stages", stages)
        numbers = [name for name in NUMBERS if name not in DATA]
        kept = choices.keep(structure, numbers) & (structure.stages <= goal.setup.spec.layers)
        structure = taken(structure, kept)
        for recompute, compiled in itertools.product(choices.recompute, compiles):
            setup = replace(structure, recompute=recompute, compile=compiled)
            setup = taken(setup, _some(possible, setup, choices))
            if np.size(setup.pp):
                yield setup


def _some(holds: Callable[[Setup], Any], setup: Setup, choices: Choices) -> Any:
    """Whether it holds with the state sharded; or, where that may be, with all of it on every data rank."""
    if 0 not in choices.zero:
        return holds(setup)
    return holds(setup) | holds(replace(setup, dp_replicate=setup.data_ranks, dp_shard=1, zero=0))


def data_splits(setup: Setup, choices: Choices = EVERYTHING) -> Iterator[Setup]:
    """The layouts that split the model so: every ZeRO stage, every dp_replicate and dp_shard."""
    ranks = np.asarray(setup.data_ranks)
    shards = sorted({shard for count in set(ranks.tolist()) for shard in divisors(count)})
    spread = _with_each(setup, "dp_shard", shards)
    replicas, rest = np.divmod(np.tile(ranks, len(shards)), spread.dp_shard)
    spread = replace(spread, dp_replicate=replicas)
    spread = taken(spread, (rest == 0) & choices.keep(spread, DATA))
    for zero in choices.zero:
        layouts = replace(spread, zero=zero)
        layouts = taken(layouts, possible(layouts))
        if np.size(layouts.pp):
            yield layouts


def _splits(goal: Goal, choices: Choices) -> Setup:
    """Every (pp, data ranks, cp, tp, ep) that spans the devices, with every micro-batch."""
    spec, given, found = goal.setup.spec, choices.given, []
    for pp in divisors(goal.gpus, spec.layers):
        for tp in divisors(goal.gpus // pp, spec.heads):
            for cp in divisors(goal.gpus // pp // tp, goal.setup.seq_len):
                dp = goal.gpus // pp // tp // cp
                shard = given.get("dp_shard", dp // given.get("dp_replicate", 1))
                replicas = given.get("dp_replicate", dp // shard if shard else 0)
                if goal.setup.global_batch % dp or replicas * shard != dp:
                    continue
                for ep in divisors(shard * cp, spec.experts or 1):
                    found.append((pp, replicas, shard, cp, tp, ep, 1, 1))
    table = np.array(found, dtype=np.int64).reshape(-1, len(NUMBERS))
    columns: dict[str, Any] = dict(zip(NUMBERS, table.T, strict=True))
    setup = replace(goal.setup, zero=max(choices.zero), **columns)
    setup = _with_each(setup, "micro_batch", choices.micro_batch)
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
