"""Passes through the parts of a model, one after the other, and the data axis' messages beside them.

Two things run at once. Compute goes through the parts, forward or backward. Messages go one after the other:
a part's weights are gathered while the part before computes, its gradients reduced while the next one does.
A part waits for its weights, and a message that runs behind compute slows it (`Costs.slowdown`).

All times are in seconds and may be arrays over many layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fivefold.axes.layout import EXPERT_SHARDS, SHARDS
from fivefold.axes.messages import Messages
from fivefold.ledger.ledger import Message
from fivefold.ledger.setup import Condition, Figure
from fivefold.planner.play.timeline import Event
from fivefold.planner.time.parts import Costs, PartTime
from fivefold.planner.time.state import state_message_time

SHARDED_OVER = (SHARDS, EXPERT_SHARDS)


class Sent(NamedTuple):
    """A part's messages: in the micro-batch that sends those of the whole step too, and in any other."""

    with_once: Figure
    without: Figure

    def times(self, share: float) -> Sent:
        return Sent(share * self.with_once, share * self.without)


class Part(NamedTuple):
    """One part of the model, one micro-batch.

    backward    both halves; `weight`: the half for gradients of weights
    gathers, gathers_again  of its weights, before forward and before backward
    reductions  of its gradients; `unhidden`: what a stack sends in a step while it computes nothing
    """

    forward: Figure
    backward: Figure
    weight: Figure
    gathers: Sent
    gathers_again: Sent
    reductions: Sent
    unhidden: Figure


@dataclass(frozen=True)
class Pass:
    """One part, one micro-batch, one direction; with what is gathered before it and reduced after it."""

    kind: str
    part: int
    number: int
    seconds: Figure
    gather: Figure = 0.0
    reduction: Figure = 0.0


class Streams:
    """Compute and messages, as far as they have come.

    computed, sent  when each is through with what it was given
    events          what they did, "gather" and "reduce" among it; kept only on demand
    """

    def __init__(self, slowdown: float, events: list[Event] | None = None):
        self.slowdown, self.events = slowdown, events
        self.computed: Figure = 0.0
        self.sent: Figure = 0.0

    def run(self, passes: Iterable[Pass]) -> None:
        """One pass after the other, each with its messages."""
        following = iter([*passes, None])
        one = next(following)
        gathered: Figure = 0.0 if one is None else self._send("gather", one, one.gather, 0.0)
        for then in following:
            assert one is not None
            start = np.maximum(self.computed, gathered)
            gathered = start if then is None else self._send("gather", then, then.gather, start)
            # What is under way at the start goes on without a gap, what is gathered meanwhile behind it.
            behind = np.maximum(np.minimum(self.sent, start + one.seconds) - start, 0.0)
            self.computed = start + one.seconds + self.slowdown * behind
            self._note(one.kind, one, start, self.computed)
            self._send("reduce", one, one.reduction, self.computed)
            one = then

    def computing(self, passes: Iterable[Pass]) -> Figure:
        """When all passes are computed."""
        self.run(passes)
        return self.computed

    @property
    def end(self) -> Figure:
        """When everything is computed and sent."""
        return np.maximum(self.computed, self.sent)

    def _send(self, kind: str, one: Pass, seconds: Figure, earliest: Figure) -> Figure:
        """Put a message behind those before; returns when it is through."""
        if not np.any(seconds):
            return earliest
        start = np.maximum(earliest, self.sent)
        self.sent = np.where(seconds, start + seconds, self.sent)
        self._note(kind, one, start, start + seconds)
        return np.where(seconds, start + seconds, earliest)

    def _note(self, kind: str, one: Pass, start: Figure, end: Figure) -> None:
        if self.events is not None:
            self.events.append(Event(0, kind, one.part, one.number, float(start), float(end)))


def step_passes(parts: Sequence[Part], count: int) -> Iterator[Pass]:
    """Every pass of a step of so many micro-batches, without a pipeline."""
    for number in range(count):
        first, last = number == 0, number == count - 1
        yield from forward_passes(parts, number, first)
        yield from backward_passes(parts, number, first, last)


def forward_passes(parts: Sequence[Part], number: int = 0, first: bool = True) -> Iterator[Pass]:
    for place, part in enumerate(parts):
        yield Pass("forward", place, number, part.forward, part.gathers[0 if first else 1])


def backward_passes(
    parts: Sequence[Part], number: int = 0, first: bool = True, last: bool = False, reduces: bool = True
) -> Iterator[Pass]:
    for place, part in reversed(list(enumerate(parts))):
        gather, reduction = part.gathers_again[0 if first else 1], part.reductions[0 if last else 1]
        yield Pass("backward", place, number, part.backward, gather, reduction if reduces else 0.0)


def parts_of(costs: Costs) -> tuple[Part, Part, Part]:
    """The embedding, a block and the head."""
    found = costs.traffic
    return (
        _part(costs, costs.embedding, found.state["embedding"]),
        _part(costs, costs.block, found.state["block"]),
        _part(costs, costs.head, found.state["head"]),
    )


def _part(costs: Costs, took: PartTime, messages: Messages) -> Part:
    stack, sharded = costs.stack, costs.setup.zero

    def sent(phase: str, weights: bool) -> Sent:
        # Where ranks shard, weights are gathered; sums of compressed gradients among ranks that do not.
        of_weights = ((m, m.operation == "all_gather" and m.group in SHARDED_OVER) for m in messages)
        mine = (m for m, gathers in of_weights if m.phase == phase and gathers == weights)
        setup = costs.setup
        return _sent(costs, mine, setup.frees_weights if weights else setup.reduces_every_micro_batch)

    gathers, reductions = sent("forward", weights=True), sent("backward", weights=False)
    ahead, behind = (1.0, 1.0) if sharded == 3 else (stack.gather_hidden, stack.dp_hidden)
    return Part(
        took.forward,
        took.backward,
        took.backward_weight,
        gathers.times(ahead),
        sent("backward", weights=True),
        reductions.times(behind),
        (1 - ahead) * gathers.with_once + (1 - behind) * reductions.with_once,
    )


def _sent(costs: Costs, messages: Iterable[Message], every: Condition) -> Sent:
    """every  whether messages that a step of one micro-batch sends are sent for each, not for the step"""
    once: Figure = 0.0
    often: Figure = 0.0
    for message in messages:
        seconds = state_message_time(costs, replace(message, count=1)) * (message.count > 0)
        repeated = (message.count > 1) | (every & (costs.setup.micro_batches == 1))
        once, often = once + seconds, often + seconds * repeated
    return Sent(once, often)
