"""What each rank computes, in which order: a function for each pipeline schedule.

All take the rank's place, the number of ranks and of micro-batches (`count`), and the rank's own stages in
forward order. Messages are added later (`actions.py`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from fivefold.schedules.actions import Action, Kind

Order = Callable[[int, int, int, list[int]], Iterable[Action]]
"""(rank, ranks, micro-batches, own stages) -> what the rank computes."""


def naive(rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
    """A micro-batch all the way forward and back before the next one starts."""
    return _running_ahead(0, count, *own)


def gpipe(rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
    """All forwards, then all backwards."""
    return _running_ahead(count, count, *own)


def one_forward_one_backward(rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
    """As few forwards as fill the pipeline, then one backward for each further forward."""
    return _running_ahead(min(count, ranks - 1 - rank), count, *own)


def _running_ahead(ahead: int, count: int, stage: int) -> Iterator[Action]:
    """Forward and backward in turns, forward so many micro-batches ahead."""
    yield from (Action("forward", stage, number) for number in range(ahead))
    for number in range(count):
        if number + ahead < count:
            yield Action("forward", stage, number + ahead)
        yield Action("backward", stage, number)


def looped_bfs(rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
    """All micro-batches through one stage, then through the next; and all the way back."""
    pairs = [(stage, number) for stage in own for number in range(count)]
    yield from (Action("forward", *pair) for pair in pairs)
    yield from (Action("backward", *pair) for pair in reversed(pairs))


def interleaved(rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
    """Stages take turns, each with one round of micro-batches; else as 1f1b."""
    forwards, backwards, around = _in_rounds(ranks, count, own)
    ahead = min(around + 2 * (ranks - 1 - rank), len(forwards))
    yield from (Action("forward", *pair) for pair in forwards[:ahead])
    for turn, pair in enumerate(backwards):
        if turn + ahead < len(forwards):
            yield Action("forward", *forwards[turn + ahead])
        yield Action("backward", *pair)


def zero_bubble(rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
    """Interleaved, its weight halves later by one for each rank before."""
    forwards, backwards, around = _in_rounds(ranks, count, own)
    return _weights_later(forwards, backwards, around + ranks - 1 - rank, late=rank)


def _handcrafted(reach: int, rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
    """Drawn by hand in the Zero Bubble paper (arXiv 2401.10241, section 2).

    A rank runs `reach` forwards ahead for each rank behind it, and its weight halves come `reach` backwards
    late for each rank before it: so all keep the same number of micro-batches.
    """
    pairs = [(stage, number) for stage in own for number in range(count)]
    return _weights_later(pairs, pairs, reach * (ranks - 1 - rank), late=reach * rank)


zb_h1, zb_h2 = partial(_handcrafted, 1), partial(_handcrafted, 2)

Pairs = list[tuple[int, int]]
"""(stage, micro-batch), in the order in which a rank takes them."""


def _weights_later(forwards: Pairs, backwards: Pairs, ahead: int, late: int) -> Iterator[Action]:
    """Forwards run so many pairs ahead, weight halves come so many late."""
    yield from (Action("forward", *pair) for pair in forwards[:ahead])
    for turn, pair in enumerate(backwards):
        if turn + ahead < len(forwards):
            yield Action("forward", *forwards[turn + ahead])
        yield Action("backward-input", *pair)
        if turn >= late:
            yield Action("backward-weight", *backwards[turn - late])
    yield from (Action("backward-weight", *pair) for pair in backwards[max(0, len(backwards) - late) :])


def _in_rounds(ranks: int, count: int, own: list[int]) -> tuple[Pairs, Pairs, int]:
    """Forward and backward pairs when stages take turns, and how many go through all stages but the last."""
    together, total = per_round(ranks, count), count * len(own)
    forwards, backwards = _in_turns(own, together, total), _in_turns(own[::-1], together, total)
    return forwards, backwards, (len(own) - 1) * together


def per_round(ranks: int, count: int) -> int:
    """Micro-batches that go together where stages take turns: rounds are equal, each near to one a rank."""
    return count // max(1, count // ranks)


def _in_turns(own: list[int], together: int, total: int) -> Pairs:
    """Stages take turns, each with the next few of its micro-batches."""
    next_of: defaultdict[int, int] = defaultdict(int)
    found = []
    for turn in range(total):
        stage = own[turn // together % len(own)]
        found.append((stage, next_of[stage]))
        next_of[stage] += 1
    return found


def zbv(rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
    """Two stages a rank, `down` and `up` the arms of a V, with both halves of backward apart."""
    down, up = own
    full = max(2 * ranks - 1, count)  # laid out for a full pipeline; what is beyond `count` falls away
    next_of: defaultdict[tuple[Kind, int], int] = defaultdict(int)

    def do(*steps: tuple[Kind, int]) -> Iterator[Action]:
        for step in steps:
            kind, stage = step
            if next_of[step] < count:
                yield Action(kind, stage, next_of[step])
            next_of[step] += 1

    kinds: tuple[Kind, ...] = ("forward", "backward-input", "backward-weight")
    forward_down, input_down, weight_down = ((kind, down) for kind in kinds)
    forward_up, input_up, weight_up = ((kind, up) for kind in kinds)
    yield from do(*[forward_down] * (2 * (ranks - rank) - 1))
    yield from do(*[forward_up, forward_down] * rank)
    yield from do(*[forward_up, input_up, weight_up] * (ranks - rank))
    while next_of[forward_up] < next_of[forward_down] or next_of[forward_down] < full:
        if next_of[forward_down] < full:
            yield from do(forward_down)
        yield from do(input_down, weight_down, forward_up, input_up, weight_up)
    yield from do(*[input_down, input_up] * rank)
    yield from do(*[input_down, weight_down] * (ranks - rank))
    yield from do(*[weight_up] * (next_of[input_up] - next_of[weight_up]))
    yield from do(*[weight_down] * (next_of[input_down] - next_of[weight_down]))


def dualpipev(rank: int, ranks: int, count: int, own: list[int]) -> Iterable[Action]:
    """A V as well; in the longest phase a forward of one arm goes with a backward of the other."""
    return _DualPipeV(rank, ranks, count, *own).order


class _DualPipeV:
    """Eight phases, one after the other."""

    def __init__(self, rank: int, ranks: int, count: int, down: int, up: int):
        self.order: list[Action] = []
        self.next_of: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.postponed: deque[tuple[int, int]] = deque()
        below = ranks - 1 - rank  # ranks nearer to the tip of the V
        for _ in range(2 * below):
            self.forward(down)
        for _ in range(rank + 1):
            self.forward(down)
            self.forward(up)
        for _ in range(below):
            self.backward(up, split=True)
            self.weight()
            self.forward(up)
        for _ in range(count - 2 * ranks + rank + 1):
            self.forward(down)
            self.backward(up)
            self.forward(up)
            self.backward(down)
        for _ in range(below):
            self.backward(up)
            self.forward(up)
            self.backward(down)
        middle = (rank + 1) // 2
        for turn in range(rank + 1):
            self.backward(up, split=turn > middle or (turn == middle and rank % 2 == 1))
            self.backward(down, split=turn >= middle)
        for _ in range(below):
            self.weight()
            self.backward(down, split=True)
        for _ in range(rank + 1):
            self.weight()

    def forward(self, stage: int) -> None:
        self.order.append(Action("forward", stage, self.number("forward", stage)))

    def backward(self, stage: int, split: bool = False) -> None:
        number = self.number("backward", stage)
        self.order.append(Action("backward-input" if split else "backward", stage, number))
        if split:
            self.postponed.append((stage, number))

    def weight(self) -> None:
        """The weight half that has waited longest, if any waits."""
        if self.postponed:
            self.order.append(Action("backward-weight", *self.postponed.popleft()))

    def number(self, kind: str, stage: int) -> int:
        """The next micro-batch of a stage in one direction."""
        found = self.next_of[kind, stage]
        self.next_of[kind, stage] += 1
        return found
