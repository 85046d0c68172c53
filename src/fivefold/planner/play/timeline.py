"""A pipeline's step, played event by event: who computes what, from when to when, and who waits.

The lists of actions are the very ones that ranks run (`schedules/`). A rank does its computations in
their order, each as soon as the one before is done and what it needs from another stage has come. What a
stage makes arrives `transfer` later where the next stage is on another rank. Sending costs the sender
nothing, and messages do not queue on a link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fivefold.schedules import Action, Kind
from fivefold.schedules.actions import COMPUTATIONS

Curve = list[tuple[float, float]]
"""(time, level from then on), at each change."""


class Event(NamedTuple):
    """What one rank does for one stage and one micro-batch, from when to when.

    kind  one of `COMPUTATIONS`; in timelines of a job also "gather", "reduce", "exposed" and "optimizer"
    """

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Durations:
    """How long each stage computes for one micro-batch, and how long a message is on its way.

    Any unit of time, the same for all. A `backward` in one piece takes both halves' time.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: float = 0.0

    @classmethod
    def equal(
        cls,
        ranks: int,
        virtual_stages: int,
        forward: float,
        backward_input: float,
        backward_weight: float,
        transfer: float = 0.0,
    ) -> Durations:
        """All ranks alike. The times are of a rank's whole load, which its virtual stages share equally."""
        stages = ranks * virtual_stages
        f, b, w = ((time / virtual_stages,) * stages for time in (forward, backward_input, backward_weight))
        return cls(f, b, w, transfer)

    def of(self, kind: Kind, stage: int) -> float:
        """How long one computation takes."""
        if kind == "backward":
            return self.backward_input[stage] + self.backward_weight[stage]
        times: tuple[float, ...] = getattr(self, kind.replace("-", "_"))
        return times[stage]


@dataclass(frozen=True)
class Timeline:
    """What every rank computed, and when. A rank's events are in the order of time."""

    rows: tuple[tuple[Event, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @cached_property
    def busy(self) -> list[float]:
        """How long each rank computes."""
        return [sum(event.end - event.start for event in row) for row in self.rows]

    @cached_property
    def step_time(self) -> float:
        """The longest any rank is busy, from its first start to its last end."""
        return max(row[-1].end - row[0].start for row in self.rows)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end of all: a step, where the optimizer waits for every rank.

        Longer than `step_time` where the last rank to begin is also the last to end, as under zb-h2.
        """
        return max(row[-1].end for row in self.rows) - min(row[0].start for row in self.rows)

    @property
    def bubble(self) -> float:
        """The part of `step_time` that ranks do not compute in, on average."""
        return 1 - sum(self.busy) / self.ranks / self.step_time

    @cached_property
    def peak_in_flight(self) -> list[float]:
        """The most micro-batches whose activations each rank keeps at once.

        One counts from its forward until the gradients of the weights are done. Of a rank with several
        stages each stage holds its share of a micro-batch.
        """
        return [max(level for _, level in self.in_flight(rank)) for rank in range(self.ranks)]

    def in_flight(self, rank: int) -> Curve:
        """Micro-batches that a rank keeps."""
        share = 1 / len({event.stage for event in self.rows[rank]})
        return [(moment, count * share) for moment, count in kept(self.rows[rank], lambda stage: 1)]


def kept(row: Sequence[Event], size: Callable[[int], float], level: float = 0) -> Curve:
    """What a rank keeps: of each stage its `size`, from forward to the gradients of the weights.

    level  what it has before the first event
    """
    found = []
    for event in row:
        if event.kind == "forward":
            level += size(event.stage)
            found.append((event.start, level))
        elif event.kind in ("backward", "backward-weight"):
            level -= size(event.stage)
            found.append((event.end, level))
    return found


def play(rows: Sequence[Sequence[Action]], durations: Durations) -> Timeline:
    """Play every rank's list of actions to its end."""
    return _Player(rows, durations).timeline()


Needed = tuple[bool, int, int]
"""What one stage waits for: activations (or gradients), for which stage, of which micro-batch."""


class _Player:
    """Advances one rank until it needs what is not there yet, then whoever waited for what that rank made."""

    def __init__(self, rows: Sequence[Sequence[Action]], durations: Durations):
        self.orders = [[action for action in row if action.kind in COMPUTATIONS] for row in rows]
        self.rank_of = {action.stage: rank for rank, order in enumerate(self.orders) for action in order}
        self.last_stage = len(self.rank_of) - 1
        self.durations = {(k, stage): durations.of(k, stage) for k in COMPUTATIONS for stage in self.rank_of}
        self.transfer = durations.transfer
        self.arrivals: dict[Needed, float] = {}
        self.waiting: dict[Needed, int] = {}
        self.played: list[list[Event]] = [[] for _ in rows]

    def timeline(self) -> Timeline:
        ready = list(range(len(self.orders)))
        while ready:
            ready += self.advance(ready.pop())
        if self.waiting:
            raise ValueError("the order of computations has a circle: every rank waits for another")
        return Timeline(tuple(map(tuple, self.played)))

    def advance(self, rank: int) -> list[int]:
        """Play one rank as far as it goes; returns the ranks that waited for what it made."""
        order, played = self.orders[rank], self.played[rank]
        clock = played[-1].end if played else 0.0
        woken = []
        while len(played) < len(order):
            kind, stage, number = action = order[len(played)]
            needed = self.needed_by(action)
            if needed is not None:
                if needed not in self.arrivals:
                    self.waiting[needed] = rank
                    break
                clock = max(clock, self.arrivals[needed])
            end = clock + self.durations[kind, stage]
            played.append(Event(rank, kind, stage, number, clock, end))
            clock = end
            if kind == "backward-weight":
                continue
            target = stage + 1 if kind == "forward" else stage - 1
            made = (kind == "forward", target, number)
            self.arrivals[made] = end if self.rank_of.get(target) == rank else end + self.transfer
            if made in self.waiting:
                woken.append(self.waiting.pop(made))
        return woken

    def needed_by(self, action: Action) -> Needed | None:
        """What has to come from another stage before this can start."""
        kind, stage, number = action
        if kind == "forward":
            return (True, stage, number) if stage > 0 else None
        if kind == "backward-weight" or stage == self.last_stage:
            return None
        return (False, stage, number)
