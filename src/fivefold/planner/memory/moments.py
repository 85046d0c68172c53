"""The moments of a rank's step: before each action, what it keeps of every stage that it holds.

An order is walked through once, whatever the sizes; what is alive at a moment is then a sum over its counts,
for many layouts at once. Equal moments are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.schedules import ALONE, Action, schedule_named
from fivefold.schedules.actions import with_reduce

KINDS = ("forward", "backward", "backward-input", "backward-weight", "reduce")
SEEN = 3
"""Without a pipeline so many micro-batches show all there is: the first, the last, and one between."""
ROUNDS = 4
"""With one, no more is kept in a step with more rounds of one micro-batch a rank than these."""

Counts = npt.NDArray[Any]


class Moments(NamedTuple):
    """What is about to be done, and of each stage of the rank what is kept.

    passes   [moments, 7]: of `KINDS`, the stage's place on the rank; whether it has no gradients yet, whether
             gradients are reduced in it, `ahead`, `fetched`, and the stage that it fetches (none: -1)
    live     [moments, stages] micro-batches between their forward and the gradients of the weights
    half     those of them that have gradients of inputs already
    sums     1 where gradients have been added up
    shards   1 where they have been reduced
    ahead    1 where the last pass was a forward one
    fetched  1 where a backward pass has gone on to the forward pass before its own, as FSDP does when it
             gathers ahead; that pass ended with this stage
    """

    passes: Counts
    live: Counts
    half: Counts
    sums: Counts
    shards: Counts
    ahead: Counts
    fetched: Counts


@lru_cache(maxsize=4096)
def moments(schedule: str, ranks: int, rank: int, count: int, virtual_stages: int, splits: bool) -> Moments:
    """Of a step of `count` micro-batches; `splits`: backward really is cut in two where the order says so."""
    if ranks == 1:
        every = min(count, SEEN)
        return _walked(ALONE.computed(0, 1, every), [0], splits=False, last=every - 1)
    row = schedule_named(schedule)
    few = ROUNDS * ranks + count % ranks
    if count > few and not row.forwards_first and row.allows(ranks, few):
        count = few
    order = with_reduce(row.computed(rank, ranks, count, virtual_stages))
    return _walked(order, row.stages_of(rank, ranks, virtual_stages), splits)


def _walked(order: Iterable[Action], stages: Sequence[int], splits: bool, last: int = -1) -> Moments:
    """last  the micro-batch whose backward reduces gradients; -1 where that is an action of its own

    `before`: by stage, after which stage each of its forward passes came that has not gone backward yet.
    """
    live, half, sums, shards, ahead, fetched = state = np.zeros((6, len(stages)), dtype=int)
    before: list[list[int]] = [[] for _ in stages]
    latest = -1
    rows = set()
    for action in order:
        kind, place = _done(action, splits), stages.index(action.stage)
        if kind is None:
            continue
        reduces = kind == "backward" and action.micro_batch == last
        fetches = before[place].pop() if kind == "backward" and last < 0 else -1
        flags = sums[place] == 0, reduces, ahead[place], fetched[place]
        what = KINDS.index(kind), place, *map(int, flags), fetches
        rows.add((what, *(tuple(each.tolist()) for each in state)))
        live[place] += {"forward": 1, "backward": -1, "backward-weight": -1}.get(kind, 0)
        half[place] += {"backward-input": 1, "backward-weight": -1}.get(kind, 0)
        if kind == "backward":  # FSDP lets go of all stages' weights
            ahead[:] = 0
        ahead[place], fetched[place] = kind == "forward", 0
        if kind == "forward":
            before[place].append(latest)
            latest = place
        if fetches >= 0:
            fetched[fetches] = 1
        if kind in ("backward", "backward-weight"):
            sums[place] = 1
        if kind == "reduce":
            sums[place], shards[place] = 0, 1
    return Moments(*(np.array(column) for column in zip(*rows, strict=True)))


def _done(action: Action, splits: bool) -> str | None:
    """What an action does. The first stage has no input to differentiate by: there all waits for the second
    half; a backward in one piece is done in the turn of the first.
    """
    if action.kind == "backward-input" and (action.stage == 0 or not splits):
        return None if splits else "backward"
    if action.kind == "backward-weight" and (action.stage == 0 or not splits):
        return "backward" if splits else None
    return action.kind
