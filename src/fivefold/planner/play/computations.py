"""The computations of a pipeline's step: which waits for which, and when each ends, for many layouts at once.

The lists of actions are the very ones that ranks run (`schedules/`). A rank does its computations in their
order, each as soon as the one before is done and what it needs from another stage has come. What a stage
makes arrives `transfer` later where the next stage is on another rank. Sending costs the sender nothing, and
messages do not queue on a link.

Layouts that share an order differ in durations alone, so these may be arrays over many layouts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.schedules import Action, schedule_named
from fivefold.schedules.actions import COMPUTATIONS, Computed

Array = npt.NDArray[Any]
Times = Sequence[float] | Array


@dataclass(frozen=True)
class Durations:
    """How long each stage computes for one micro-batch, and how long a message is on its way.

    Any unit of time, the same for all. [stages], or [stages, layouts]; `transfer` has no stages. A `backward`
    in one piece takes both halves' time.

    first_forward  of the first micro-batch, where it takes longer than the others
    ready          before which a stage cannot begin
    """

    forward: Times
    backward_input: Times
    backward_weight: Times
    transfer: Any = 0.0
    first_forward: Times | None = None
    ready: Times | None = None

    def table(self) -> Array:
        """[kinds, stages, layouts]: of `COMPUTATIONS`, then of the first forward."""
        forward, half, other = map(np.asarray, (self.forward, self.backward_input, self.backward_weight))
        first = forward if self.first_forward is None else np.asarray(self.first_forward)
        table = np.stack([forward, half + other, half, other, first])
        return table.reshape(*table.shape[:2], -1)


FORWARD, FIRST_FORWARD = COMPUTATIONS.index("forward"), len(COMPUTATIONS)


class Computations:
    """What every rank computes in a step, as arrays over all of it, each behind what it waits for.

    computed  all of it
    rows      rank -> the places of its computations, in order
    """

    def __init__(self, rows: Sequence[Iterable[Action]]):
        orders = [Computed.of(row) for row in rows]
        sizes = [len(order.kinds) for order in orders]
        kinds, stages, numbers = (
            np.concatenate([getattr(order, field.name) for order in orders]) for field in fields(Computed)
        )
        ends = np.cumsum(sizes)
        ranks = np.repeat(np.arange(len(orders)), sizes)
        sources, none = _sources(kinds, stages, numbers), len(kinds)
        depths = _depths(sources.tolist(), ends.tolist())
        # Those of equal depth wait only for lesser ones: they are timed together.
        order = np.argsort(depths, kind="stable")
        place = np.empty(none + 1, dtype=np.int64)
        place[order], place[none] = np.arange(none), none  # the last stands for the start of all
        previous = np.arange(-1, none - 1)
        previous[[0, *ends[:-1]]] = none
        self.computed = Computed(kinds[order], stages[order], numbers[order])
        self.rows = np.split(place[:none], ends[:-1])
        self._previous, self._source = place[previous][order], place[sources][order]
        self._crosses = ((sources < none) & (ranks != np.append(ranks, -1)[sources]))[order]
        self._ends = np.searchsorted(depths[order], np.arange(1, depths.max() + 2))
        self._kinds = np.where((kinds == FORWARD) & (numbers == 0), FIRST_FORWARD, kinds)[order]
        self._stages = self.computed.stages

    @cached_property
    def last_backwards(self) -> list[list[tuple[int, int]]]:
        """Of each rank (stage, place of its last backward), for its stages in the order in which they end."""
        found = []
        for row in self.rows:  # a stage's last computation is a backward
            places = row.tolist()
            last = dict(zip(self._stages[row].tolist(), places, strict=True))
            found.append(sorted(last.items(), key=lambda item: places.index(item[1])))
        return found

    def taking(self, times: Durations) -> Array:
        """[computations, layouts] how long each takes."""
        found: Array = times.table()[self._kinds, self._stages]
        return found

    def ends(self, times: Durations) -> Array:
        """[computations, layouts] when each ends."""
        taking = self.taking(times)
        ends = np.zeros((len(taking) + 1, taking.shape[-1]))
        if times.ready is not None:
            first = self._kinds == FIRST_FORWARD
            ends[:-1][first] = np.asarray(times.ready)[self._stages[first]]
        transfer = np.broadcast_to(times.transfer, ends.shape[1])
        for low, high in zip(self._ends[:-1], self._ends[1:], strict=True):
            come = ends[self._source[low:high]] + self._crosses[low:high, None] * transfer
            start = np.maximum(ends[self._previous[low:high]], come)
            ends[low:high] = np.maximum(start, ends[low:high]) + taking[low:high]
        return ends[:-1]

    def longest(self, times: Durations) -> float:
        """The longest any rank is busy, from its first start to its last end; of ONE layout."""
        ends, taking = self.ends(times), self.taking(times)
        return max(float(ends[row[-1], 0] - ends[row[0], 0] + taking[row[0], 0]) for row in self.rows)


def _sources(kinds: Array, stages: Array, numbers: Array) -> Array:
    """Of each computation the one whose result it waits for; their number where there is none."""
    none, forward = len(kinds), kinds == FORWARD
    made = np.full((2, stages.max() + 3, numbers.max() + 1), none)  # nothing before and behind the stages
    gives = kinds != COMPUTATIONS.index("backward-weight")
    made[forward[gives] * 1, stages[gives] + 1, numbers[gives]] = np.flatnonzero(gives)
    return np.where(gives, made[forward * 1, np.where(forward, stages, stages + 2), numbers], none)


def _depths(sources: list[int], ends: list[int]) -> Array:
    """How many computations, at the most, stand one behind the other up to each one, itself counted.

    ends  of the ranks' parts of the list. Ranks take turns, each as far as what it waits for is there.
    """
    depths = [-1] * ends[-1] + [0]
    starts = [0, *ends[:-1]]
    reached, left = list(starts), ends[-1]
    while left:
        before = left
        for rank, place in enumerate(reached):
            depth = depths[place - 1] if place > starts[rank] else 0
            while place < ends[rank] and depths[sources[place]] >= 0:
                depth = max(depth, depths[sources[place]]) + 1
                depths[place] = depth
                place += 1
            left -= place - reached[rank]
            reached[rank] = place
        if left == before:
            raise ValueError("the order of computations has a circle: every rank waits for another")
    return np.array(depths[:-1])


@lru_cache(maxsize=512)
def computations(schedule: str, ranks: int, micro_batches: int, virtual_stages: int) -> Computations:
    """Of a step of a schedule that has an order of its own."""
    row = schedule_named(schedule)
    return Computations([row.computed(rank, ranks, micro_batches, virtual_stages) for rank in range(ranks)])
