"""A step without a pipeline, block by block: what a rank computes, and the data axis' messages beside it.

Two things run at once. Compute goes through the parts of the model, forward and backward, micro-batch by
micro-batch. The messages of the data axis go one after the other: a part's weights are gathered while the
part before computes, its gradients reduced while the next one does. A part waits for its weights, the
optimizer for the last gradients, and a message that runs behind compute slows it (`Costs.slowdown`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from fivefold.ledger.ledger import Message
from fivefold.planner.play.timeline import Event
from fivefold.planner.time.estimate import optimizer_time
from fivefold.planner.time.parts import Costs, PartTime


@dataclass(frozen=True)
class Streams:
    """A step of one rank, in seconds: two rows of events that overlap in time.

    compute   forward and backward of every part; `stage` is the part's number, embedding first, head last
    messages  gathers and reductions of the data axis
    undisturbed  seconds that compute alone would take
    late      seconds of the messages behind all others: sums over tp, the loss and the norm
    """

    compute: tuple[Event, ...]
    messages: tuple[Event, ...]
    undisturbed: float
    late: float
    optimizer: float

    @property
    def end(self) -> float:
        """When gradients are complete."""
        return max(event.end for event in (*self.compute[-1:], *self.messages[-1:]))

    @property
    def exposed(self) -> float:
        """Seconds that the messages add: waiting for them, and compute that they slow."""
        return max(0.0, self.end + self.late - self.undisturbed)

    @property
    def step_time(self) -> float:
        return self.end + self.late + self.optimizer


class _Sent(NamedTuple):
    """Seconds of a part's messages: in the micro-batch that sends those of the step too, and in any other."""

    with_once: float
    without: float


@dataclass(frozen=True)
class _Part:
    forward: float
    backward: float
    gathers: _Sent
    gathers_again: _Sent
    reductions: _Sent


SEEN = 4
"""After so many micro-batches, each further one takes as long as the one before."""


def blocks_time(costs: Costs) -> float:
    """Seconds of a step of ONE layout without a pipeline; of many micro-batches only some are played."""
    count = int(costs.setup.micro_batches)
    if count <= SEEN:
        return play_blocks(costs, count).step_time
    before, after = (play_blocks(costs, number).step_time for number in (SEEN - 1, SEEN))
    return after + (count - SEEN) * (after - before)


def play_blocks(costs: Costs, micro_batches: int) -> Streams:
    """Every event of a step of so many micro-batches, of ONE layout without a pipeline."""
    setup, found = costs.setup, costs.traffic
    embedding = _part(costs, costs.embedding, found.embedding_state)
    block = _part(costs, costs.block, found.block_state)
    head = _part(costs, costs.head, found.head_state)
    parts = [embedding, *[block] * setup.spec.layers, head]
    compute, messages = _played(parts, micro_batches, costs.slowdown)
    late = float(costs.late(setup.spec.layers))
    optimizer = float(optimizer_time(costs))
    alone = sum(part.forward + part.backward for part in parts) * micro_batches
    return Streams(tuple(compute), tuple(messages), alone, late, optimizer)


def _part(costs: Costs, took: PartTime, messages: Iterable[Message]) -> _Part:
    messages = list(messages)
    # Without shards no weights are gathered, but sums of compressed gradients may be.
    gathers = [m for m in messages if m.operation == "all_gather" and costs.setup.zero]
    others = [m for m in messages if m not in gathers]
    return _Part(
        float(took.forward),
        float(took.backward),
        _sent(costs, (m for m in gathers if m.phase == "forward")),
        _sent(costs, (m for m in gathers if m.phase == "backward")),
        _sent(costs, (m for m in others if m.phase == "backward")),
    )


def _sent(costs: Costs, messages: Iterable[Message]) -> _Sent:
    every = costs.setup.micro_batches
    took = [(float(costs.state_message(replace(m, count=1))), m.count == every) for m in messages]
    return _Sent(sum(seconds for seconds, _ in took), sum(seconds for seconds, often in took if often))


@dataclass(frozen=True)
class _Pass:
    """One part, one micro-batch, one direction; with what is gathered before and reduced after it."""

    kind: str
    part: int
    number: int
    seconds: float
    gather: float
    reduction: float


def _passes(parts: list[_Part], count: int) -> Iterator[_Pass]:
    for number in range(count):
        first, last = int(number > 0), int(number < count - 1)  # which of the two times of `_Sent`
        for place, part in enumerate(parts):
            yield _Pass("forward", place, number, part.forward, part.gathers[first], 0.0)
        for place, part in reversed(list(enumerate(parts))):
            gather, reduction = part.gathers_again[first], part.reductions[last]
            yield _Pass("backward", place, number, part.backward, gather, reduction)


def _played(parts: list[_Part], count: int, slowdown: float) -> tuple[list[Event], list[Event]]:
    """Both rows of events."""
    computed: list[Event] = []
    messages: list[Event] = []

    def send(kind: str, one: _Pass, seconds: float, earliest: float) -> float:
        """Put a message behind those before; returns when it is through."""
        if seconds == 0:
            return earliest
        start = max(earliest, messages[-1].end if messages else 0.0)
        messages.append(Event(0, kind, one.part, one.number, start, start + seconds))
        return start + seconds

    passes = list(_passes(parts, count))
    now, gathered = 0.0, send("gather", passes[0], passes[0].gather, 0.0)
    for one, following in pairwise([*passes, None]):
        assert one is not None
        start = max(now, gathered)
        if following is not None:
            gathered = send("gather", following, following.gather, start)
        now = start + one.seconds + slowdown * _overlap(messages, start, start + one.seconds)
        computed.append(Event(0, one.kind, one.part, one.number, start, now))
        send("reduce", one, one.reduction, now)
    return computed, messages


def _overlap(messages: list[Event], start: float, end: float) -> float:
    """For how long messages run between two moments; all later ones are still to come."""
    total = 0.0
    for message in reversed(messages):
        if message.end <= start:
            break
        total += max(0.0, min(end, message.end) - max(start, message.start))
    return total
