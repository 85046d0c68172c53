"""What each rank computes, in which order: a function for each pipeline schedule.

All take the rank's place, the number of ranks and of micro-batches (`count`), and the rank's own stages in
forward order. Messages are added later (`actions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.schedules.actions import COMPUTATIONS, Action, Computed

Order = Callable[[int, int, int, list[int]], Iterable[Action]]
"""(rank, ranks, micro-batches, own stages) -> what the rank computes: actions, or quicker as `Computed`."""

Pairs = npt.NDArray[Any]
"""[pairs, 2] of stage and micro-batch, in the order in which a rank takes them."""

F, B, I, W = range(len(COMPUTATIONS))  # noqa: E741


def naive(rank: int, ranks: int, count: int, own: list[int]) -> Computed:
    """A micro-batch all the way forward and back before the next one starts."""
    return _alternating(*_straight(count, own), ahead=0)


def gpipe(rank: int, ranks: int, count: int, own: list[int]) -> Computed:
    """All forwards, then all backwards."""
    return _alternating(*_straight(count, own), ahead=count)


def one_forward_one_backward(rank: int, ranks: int, count: int, own: list[int]) -> Computed:
    """As few forwards as fill the pipeline, then one backward for each further forward."""
    return _alternating(*_straight(count, own), ahead=ranks - 1 - rank)


def looped_bfs(rank: int, ranks: int, count: int, own: list[int]) -> Computed:
    """All micro-batches through one stage, then through the next; and all the way back."""
    pairs, _ = _straight(count, own)
    return _alternating(pairs, pairs[::-1], ahead=len(pairs))


def interleaved(rank: int, ranks: int, count: int, own: list[int]) -> Computed:
    """Stages take turns, each with one round of micro-batches; else as 1f1b."""
    around = (len(own) - 1) * per_round(ranks, count)  # pairs until the last stage has its first turn
    return _alternating(*_in_rounds(ranks, count, own), ahead=around + 2 * (ranks - 1 - rank))


def zero_bubble(rank: int, ranks: int, count: int, own: list[int]) -> Computed:
    """Interleaved, its weight halves later by one for each rank before."""
    around = (len(own) - 1) * per_round(ranks, count)
    return _alternating(*_in_rounds(ranks, count, own), ahead=around + ranks - 1 - rank, late=rank)


def _handcrafted(reach: int, rank: int, ranks: int, count: int, own: list[int]) -> Computed:
    """Drawn by hand in the Zero Bubble paper (arXiv 2401.10241, section 2).

    A rank runs `reach` forwards ahead for each rank behind it, and its weight halves come `reach` backwards
    late for each rank before it: so all keep the same number of micro-batches.
    """
    return _alternating(*_straight(count, own), ahead=reach * (ranks - 1 - rank), late=reach * rank)


zb_h1, zb_h2 = partial(_handcrafted, 1), partial(_handcrafted, 2)


def per_round(ranks: int, count: int) -> int:
    """Micro-batches that go together where stages take turns: rounds are equal, each near to one a rank."""
    return count // max(1, count // ranks)


def _straight(count: int, own: list[int]) -> tuple[Pairs, Pairs]:
    """Forward and backward pairs: all micro-batches of one stage, then of the next."""
    pairs = np.stack([np.repeat(own, count), np.tile(np.arange(count), len(own))], axis=-1)
    return pairs, pairs


def _in_rounds(ranks: int, count: int, own: list[int]) -> tuple[Pairs, Pairs]:
    """Forward and backward pairs: the stages take turns, each with the micro-batches of one round."""
    together = per_round(ranks, count)
    numbers = np.repeat(np.arange(count).reshape(-1, together), len(own), axis=0).reshape(-1)
    forwards, backwards = (
        np.stack([np.tile(np.repeat(stages, together), count // together), numbers], axis=-1)
        for stages in (own, own[::-1])
    )
    return forwards, backwards


def _alternating(forwards: Pairs, backwards: Pairs, ahead: int, late: int | None = None) -> Computed:
    """Some forwards first, then a forward and a backward in turns.

    ahead  how many pairs run forward before the first one runs backward
    late   backward is cut in two, and the weight half of a pair comes this many pairs after its input half;
           None: backward is one action
    """
    turns = np.arange(len(backwards))
    done = [(F, forwards, 3 * (turns - ahead)), (B if late is None else I, backwards, 3 * turns + 1)]
    if late is not None:
        done.append((W, backwards, 3 * (turns + late) + 2))
    kinds = np.repeat([kind for kind, _, _ in done], len(turns))
    order = np.argsort(np.concatenate([moment for _, _, moment in done]))
    return Computed(kinds[order], *np.concatenate([pairs for _, pairs, _ in done])[order].T)


# --- two stages a rank, the arms of a V --------------------------------------------------------------------

Step = tuple[int, int]
"""What is done for a stage; its micro-batch is the next one."""


def zbv(rank: int, ranks: int, count: int, own: list[int]) -> Computed:
    """Both halves of backward are always apart."""
    down, up = own
    full = max(2 * ranks - 1, count)  # laid out for a full pipeline; what is beyond `count` falls away
    below = ranks - 1 - rank  # ranks nearer to the tip of the V
    steps: list[Step] = [
        *[(F, down)] * (2 * below + 1),
        *[(F, up), (F, down)] * rank,
        *[(F, up), (I, up), (W, up)] * (below + 1),
        *[(F, down), (I, down), (W, down), (F, up), (I, up), (W, up)] * (full - 2 * ranks + rank + 1),
        *[(I, down), (W, down), (F, up), (I, up), (W, up)] * below,
        *[(I, down), (I, up)] * rank,
        *[(I, down), (W, down)] * (below + 1),
        *[(W, up)] * rank,
        *[(W, down)] * rank,
    ]
    return _numbered(steps, count)


def dualpipev(rank: int, ranks: int, count: int, own: list[int]) -> Computed:
    """In the longest phase a forward of one arm goes with a backward of the other."""
    down, up = own
    below = ranks - 1 - rank  # ranks nearer to the tip of the V
    # Backward is whole in the first half of the last backwards, and cut in two from there on.
    turning: list[Step] = [(B, up), (B, down)] * (rank + 1)
    turning[rank + 1 :] = [(I, stage) for _, stage in turning[rank + 1 :]]
    postponed = [stage for kind, stage in turning if kind == I] + [down] * below
    steps: list[Step] = [
        *[(F, down)] * (2 * below),
        *[(F, down), (F, up)] * (rank + 1),
        *[(I, up), (W, up), (F, up)] * below,
        *[(F, down), (B, up), (F, up), (B, down)] * (count - 2 * ranks + rank + 1),
        *[(B, up), (F, up), (B, down)] * below,
        *turning,
        *[step for stage in postponed[:below] for step in ((W, stage), (I, down))],
        *[(W, stage) for stage in postponed[below:]],
    ]
    return _numbered(steps, count)


def _numbered(steps: Iterable[Step], count: int) -> Computed:
    """The steps as actions: each takes the next micro-batch of its stage, if there is one.

    A weight half takes the one whose input half was done first.
    """
    kinds, stages = np.array(list(steps)).T
    numbers = np.empty(len(kinds), dtype=np.int64)
    for stage in np.unique(stages):
        for some in ((F,), (B, I)):
            mine = np.flatnonzero((stages == stage) & np.isin(kinds, some))
            numbers[mine] = np.arange(len(mine))
        halves, others = ((stages == stage) & (kinds == kind) for kind in (I, W))
        numbers[others] = numbers[halves]
    there = numbers < count
    return Computed(kinds[there], stages[there], numbers[there])
