"""The moments of a rank's step: before each action, what it keeps of every stage that it holds.

An order is walked through once, whatever the sizes; what is alive at a moment is then a sum over its counts,
for many layouts at once. Equal moments are one.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.schedules import ALONE, schedule_named
from fivefold.schedules.actions import COMPUTATIONS, Computed

KINDS = (*COMPUTATIONS, "reduce")
ROUNDS = 4
"""So many of one micro-batch a rank show all there is: with more, no more is kept."""

Counts = npt.NDArray[Any]


class Moments(NamedTuple):
    """What is about to be done, and of each stage of the rank what is kept.

    stages   those that the rank holds
    passes   [passes, 5]: of `KINDS`, the stage's place on the rank; whether it has no gradients yet, whether
             gradients are reduced in it, and `stays`
    next     [moments] which pass comes
    live     [moments, stages] micro-batches between their forward and the gradients of the weights
    half     those of them that have gradients of inputs already
    sums     1 where gradients have been added up
    shards   1 where they have been reduced
    stays    1 where the last pass was a forward one, so that its last weights are still gathered
    """

    stages: Sequence[int]
    passes: Counts
    next: Counts
    live: Counts
    half: Counts
    sums: Counts
    shards: Counts
    stays: Counts


@lru_cache(maxsize=4096)
def moments(schedule: str, ranks: int, rank: int, count: int, virtual_stages: int, splits: bool) -> Moments:
    """Of a step of `count` micro-batches; `splits`: backward really is cut in two where the order says so."""
    row, alone = schedule_named(schedule) if ranks > 1 else ALONE, ranks == 1
    few = ROUNDS * ranks + count % ranks
    if count > few and not row.forwards_first and row.allows(ranks, few):
        count = few
    order = row.computed(rank, ranks, count, virtual_stages)
    stages = row.stages_of(rank, ranks, virtual_stages)
    kinds, places = _done(order, splits), np.searchsorted(stages, order.stages)
    if not alone:  # behind the last backward of each stage
        behind = [int(np.flatnonzero(places == place)[-1]) + 1 for place in range(len(stages))]
        kinds = np.insert(kinds, behind, KINDS.index("reduce"))
        places = np.insert(places, behind, range(len(stages)))
    kinds, places = kinds[kinds >= 0], places[kinds >= 0]
    here = places[:, None] == np.arange(len(stages))
    forward, backward, half, weight, reduced = ((kinds == kind)[:, None] & here for kind in range(len(KINDS)))

    def before(change: Counts) -> Counts:
        return change.cumsum(axis=0) - change

    def when(happened: Counts) -> Counts:
        """Which action it was that it happened in last, before each one; -1: none."""
        found = np.maximum.accumulate(np.where(happened, np.arange(len(kinds))[:, None], -1), axis=0)
        return np.insert(found[:-1], 0, -1, axis=0)

    whole = 1 * (backward | weight)
    shards = before(1 * reduced)
    sums = (before(whole) > 0) & (shards == 0)
    # A backward pass lets go of all stages' weights.
    latest = when(here)
    stays = (when(forward) == latest) & (latest > when(backward.any(axis=1, keepdims=True)))
    reduces = alone & (np.arange(len(kinds)) == len(kinds) - 1)
    passes = (kinds, places, ~sums[here], reduces, stays[here])
    state = (before(1 * forward - whole), before(1 * half - weight), sums, shards, stays)
    rows = np.unique(np.concatenate([np.stack(passes, axis=-1), *state], axis=-1), axis=0)
    come, *counts = np.split(rows, len(passes) + len(stages) * np.arange(len(state)), axis=-1)
    distinct, following = np.unique(come, axis=0, return_inverse=True)
    return Moments(stages, distinct, following.reshape(-1), *counts)


def in_flight(schedule: str, ranks: int, rank: int, count: int, virtual_stages: int) -> int:
    """The most (stage, micro-batch) pairs whose activations a rank keeps, until their weights' gradients."""
    row = schedule_named(schedule) if ranks > 1 else ALONE
    if row.memory_limit is not None:  # of an order that is searched for
        most = row.memory_limit * (ranks - 1) + 1
    else:
        defined = max(count, row.fewest(ranks))
        most = moments(schedule, ranks, rank, defined, virtual_stages, splits=True).live.sum(axis=1).max()
    return min(int(most), count * virtual_stages)


def _done(order: Computed, splits: bool) -> Counts:
    """What each action does, of `KINDS`; -1 for nothing. The first stage has no input to differentiate by:
    there all waits for the second half; a backward in one piece is done in the turn of the first.
    """
    backward, half, weight = (KINDS.index(kind) for kind in ("backward", "backward-input", "backward-weight"))
    one_piece = (order.stages == 0) | (not splits)
    found = np.where(one_piece & (order.kinds == half), -1 if splits else backward, order.kinds)
    return np.where(one_piece & (order.kinds == weight), backward if splits else -1, found)
