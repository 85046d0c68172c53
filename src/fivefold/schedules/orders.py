"""What each rank computes, in which order, by pipeline schedule.

All take the rank's place, the number of ranks and of micro-batches (`count`), and the rank's own stages in
forward order. Messages are added later (`actions.py`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator

from fivefold.schedules.actions import Action, Kind

Order = Callable[[int, int, int, list[int]], Iterable[Action]]
"""(rank, ranks, micro-batches, own stages) -> what the rank computes."""


def forwards_first(rank: int, ranks: int, count: int, own: list[int], *, back: int) -> Iterator[Action]:
    """All micro-batches through one stage, then through the next; and back.

    back  1: in the order of the forwards; -1: the last one first
    """
    pairs = list(itertools.product(own, range(count)))
    yield from (Action("forward", *pair) for pair in pairs)
    yield from (Action("backward", *pair) for pair in pairs[::back])


def in_turns(
    rank: int, ranks: int, count: int, own: list[int], *, reach: int, halves: bool = False
) -> Iterator[Action]:
    """Some forwards first, then a forward and a backward in turns.

    Several stages take turns, each with the micro-batches of one round. Rounds are equal, each near to one
    micro-batch a rank.

    reach   how many forwards a rank runs ahead for each rank behind it, once all its stages had their turn
    halves  backward is cut in two, and weight halves come `reach` backwards late for each rank before: so all
            ranks keep the same number of micro-batches (arXiv 2401.10241, section 2)
    """
    together = count // max(1, count // ranks)
    rounds = [range(count)[first : first + together] for first in range(0, count, together)]
    forwards = [(stage, number) for numbers in rounds for stage in own for number in numbers]
    backwards = [(stage, number) for numbers in rounds for stage in reversed(own) for number in numbers]
    ahead, late = (len(own) - 1) * together + reach * (ranks - 1 - rank), reach * rank
    yield from (Action("forward", *pair) for pair in forwards[:ahead])
    for turn, pair in enumerate(backwards):
        if turn + ahead < len(forwards):
            yield Action("forward", *forwards[turn + ahead])
        yield Action("backward-input" if halves else "backward", *pair)
        if halves and turn >= late:
            yield Action("backward-weight", *backwards[turn - late])
    if halves and late:
        yield from (Action("backward-weight", *pair) for pair in backwards[-late:])


# --- two stages a rank, the arms of a V --------------------------------------------------------------------

Step = tuple[Kind, int]
"""What is done for a stage; its micro-batch is the next one."""

F: Kind = "forward"
B: Kind = "backward"
I: Kind = "backward-input"  # noqa: E741
W: Kind = "backward-weight"


def zbv(rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
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


def dualpipev(rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
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


def _numbered(steps: Iterable[Step], count: int) -> Iterator[Action]:
    """The steps as actions: each takes the next micro-batch of its stage, if there is one.

    A weight half takes the one whose input half was done first.
    """
    numbers: defaultdict[tuple[bool, int], Iterator[int]] = defaultdict(itertools.count)
    half_done: defaultdict[int, deque[int]] = defaultdict(deque)
    for kind, stage in steps:
        number = half_done[stage].popleft() if kind == W else next(numbers[kind == F, stage])
        if kind == I:
            half_done[stage].append(number)
        if number < count:
            yield Action(kind, stage, number)
