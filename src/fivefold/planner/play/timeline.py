"""A pipeline's step, computation by computation: who computes what, from when to when, and who waits."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fivefold.planner.play.computations import Computations, Durations
from fivefold.planner.play.zero_bubble import any_computations
from fivefold.schedules import Action

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


def played(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, durations: Durations
) -> Timeline:
    """One step of any schedule by its name, of ONE layout."""
    return timeline(any_computations(schedule, ranks, micro_batches, virtual_stages, durations), durations)


def play(rows: Sequence[Iterable[Action]], durations: Durations) -> Timeline:
    """Play every rank's list of actions to its end."""
    return timeline(Computations(rows), durations)


def timeline(computations: Computations, durations: Durations) -> Timeline:
    """When everything is computed, of ONE layout."""
    ends, taking = computations.ends(durations)[:, 0], computations.taking(durations)[:, 0]
    actions = list(computations.computed)
    return Timeline(
        tuple(
            tuple(
                Event(rank, kind, stage, number, float(ends[place] - taking[place]), float(ends[place]))
                for place, (kind, stage, number) in ((place, actions[place]) for place in row)
            )
            for rank, row in enumerate(computations.rows)
        )
    )
