"""The best layouts of a job on a cluster: all are bounded, and what could be among the best is played.

Bounds are never above what is played (`bounds.py`). So layouts are played in the order of their bounds, until
the next bound is above the times that were found: no layout that was not played is faster.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fivefold.hardware.cluster import Cluster
from fivefold.ledger.setup import Setup
from fivefold.planner.goal import Goal
from fivefold.planner.memory.fullest_rank import GIB, counted_on, fits, memory
from fivefold.planner.play.arrays import from_table, taken
from fivefold.planner.play.step_time import step_times
from fivefold.planner.play.timed import NOTHING, Timed
from fivefold.planner.search.bounds import least_time, least_with_messages
from fivefold.planner.search.candidates import EVERYTHING, Choices, data_splits, model_splits
from fivefold.planner.search.known_parts import KnownParts
from fivefold.planner.search.memory_bounds import least_memory, least_of_ends
from fivefold.planner.search.planned import DEGREES, Degrees, Planned, planned_alone
from fivefold.planner.time.parts import Costs

BATCH, TOGETHER = 2048, 128
"""How many ways to split the model are looked at more closely at first, then four times as many; and how
many layouts are played together, then twice as many."""
NEAR, FAR = 1.002, 2.0
"""Layouts are played that may be so many times as slow as the best; the second, until enough are found."""
LEANEST = 300
"""Where nothing fits, of how many layouts with the least bound of memory the memory is played."""
FRONT, LEANER = 12, 0.98
"""Of the layouts from the leanest to the fastest, how many are shown; and what part of a faster one's memory
a layout may need, by its bound, for its own to be played."""
SOME = 32
"""Of how many layouts the memory is played at a time, to fill the table."""

Array = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, repr=False)
class SearchResult:
    """What a search found.

    best      fastest first, one for each set of degrees, all of which fit
    front     from the leanest to the fastest: each is faster than all that need less memory
    nearest   where nothing fits: the layout that needs the least memory
    bounded   layouts that were looked at
    played    those of them whose memory or time was played
    """

    best: list[Planned]
    front: list[Planned]
    nearest: Planned | None
    bounded: int
    played: int
    seconds: float

    def __repr__(self) -> str:
        return f"<best of {self.bounded:,} layouts: {self.best[0] if self.best else None}>"


def search(goal: Goal, cluster: Cluster, choices: Choices = EVERYTHING, best: int = 6) -> SearchResult:
    """The `best` layouts for a goal."""
    started = time.perf_counter()
    pool = Pool(cluster, choices)
    for splits in model_splits(goal, choices):
        pool.add(splits)
    fastest = pool.fastest(best)
    return SearchResult(
        best=fastest,
        front=pool.front() if fastest else [],
        nearest=None if fastest else pool.leanest(),
        bounded=pool.bounded,
        played=pool.played,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True)
class Bounded:
    """Layouts of one structure, with the bounds of their times and of the memory they need.

    timed  [layouts, figures] what their steps are put together from; None for ways to split the model
    """

    setup: Setup
    times: Array
    needs: Array
    timed: Array | None = None


class Best:
    """The fastest layouts so far, one for each set of degrees; `count` of them are wanted."""

    def __init__(self, count: int):
        self.count = count
        self.found: dict[Degrees, Planned] = {}

    def keep(self, some: Sequence[Planned]) -> None:
        """Of each set of degrees the fastest."""
        for planned in some:
            if planned.step_time <= self.found.setdefault(planned.degrees, planned).step_time:
                self.found[planned.degrees] = planned

    @property
    def fastest(self) -> list[Planned]:
        return sorted(self.found.values(), key=lambda planned: planned.step_time)[: self.count]

    @property
    def slowest(self) -> float:
        """What a layout of other degrees has to be faster than."""
        return self.fastest[-1].step_time if len(self.found) >= self.count else np.inf

    @property
    def longest(self) -> float:
        """Up to which time layouts are played."""
        if len(self.found) >= self.count:
            return min(self.slowest, NEAR * self.fastest[0].step_time)
        return FAR * self.fastest[0].step_time if self.found else np.inf

    def faster(self, layouts: Bounded) -> Bounded:
        """Those that may be shown: of layouts with the same degrees only the fastest is."""
        longest, columns = self.longest, (getattr(layouts.setup, name) for name in DEGREES)
        degrees = zip(
            *(np.broadcast_to(column, len(layouts.times)).tolist() for column in columns), strict=True
        )
        known = (self.found.get(each) for each in degrees)
        limits = [min(longest, planned.step_time) if planned else longest for planned in known]
        return taken(layouts, layouts.times < limits)


class Pool:
    """Ways to split the model, by the bounds of all their layouts; and what was played of these.

    timed    layouts whose steps were played, with their times and the bounds of their memory
    fitting  those whose memory was played too, and fits
    """

    def __init__(self, cluster: Cluster, choices: Choices):
        self.cluster, self.choices, self.parts = cluster, choices, KnownParts(cluster)
        self.room = counted_on(cluster) * GIB
        self.splits: list[Bounded] = []
        self.too_large: list[Bounded] = []
        self.timed: list[Bounded] = []
        self.fitting: list[Planned] = []
        self.bounded = self.played = 0

    def add(self, splits: Setup) -> None:
        """Bound these ways to split the model, their state sharded as far as may be."""
        self.bounded += np.size(splits.pp)
        needs = np.asarray(least_memory(splits, self.cluster))
        small = needs <= self.room
        if small.any():
            splits, needs = taken(splits, small), needs[small]
            times = np.asarray(least_time(self.parts.costs(splits)))
            self.splits.append(Bounded(splits, times, needs))
        else:
            least = np.argsort(needs)[:LEANEST]
            self.too_large.append(taken(Bounded(splits, needs, needs), least))

    def fastest(self, count: int) -> list[Planned]:
        """The fastest that fit, one for each set of degrees."""
        best = Best(count)
        self._improve(best, self._some_of_each_size())
        bounds, _, group, row = _in_order(self.splits)
        start = 0
        while (end := int(np.searchsorted(bounds, best.longest))) > start:
            some = slice(start, min(end, max(BATCH, 4 * start)))
            splits = _picked(self.splits, group[some], row[some])
            self._improve(best, self._layouts(splits, best.longest))
            start = some.stop
        self._complete(best)
        return best.fastest

    def _some_of_each_size(self) -> list[Bounded]:
        """The fastest layouts within less and less memory, by their bounds."""
        if not self.splits:
            return []
        rooms = np.linspace(min(each.needs.min() for each in self.splits), self.room, FRONT)
        return _within(rooms, self._layouts(_within(rooms, self.splits, 32)), 3)

    def _improve(self, best: Best, layouts: Sequence[Bounded]) -> None:
        """Play those of these layouts that may be faster than the best so far of their degrees."""
        _, _, group, row = _in_order(layouts)
        start, size = 0, TOGETHER
        while start < len(row):
            some = slice(start, start + size)
            near = [best.faster(each) for each in _picked(layouts, group[some], row[some])]
            for each in self._played([each for each in near if len(each.times)]):
                best.keep(self._that_fit(best.faster(each)))
            start, size = some.stop, 2 * size

    def _complete(self, best: Best) -> None:
        """Add layouts of other degrees whose steps were played, though they were too long to be the best."""
        times, _, group, row = _in_order(self.timed)
        for start in range(0, len(times), SOME):
            if times[start] >= best.slowest:
                break
            some = slice(start, start + SOME)
            for each in _picked(self.timed, group[some], row[some]):
                best.keep(self._that_fit(each))

    def _layouts(self, splits: Sequence[Bounded], longest: float = np.inf) -> list[Bounded]:
        """Of these ways to split the model, the layouts that may fit and be faster than `longest`.

        The bounds of their times count messages too.
        """
        found = []
        for setup in (setup for each in splits for setup in data_splits(each.setup, self.choices)):
            if setup.runs_like_zero_1 and 1 in self.choices.zero:
                continue
            self.bounded += np.size(setup.pp)
            needs = np.asarray(least_memory(setup, self.cluster))
            setup, needs = taken((setup, needs), needs <= self.room)
            if not len(needs):
                continue
            costs = self.parts.costs(setup)
            timed = Timed.table(costs)
            times = np.asarray(least_with_messages(costs, from_table(NOTHING, timed)))
            near = taken(Bounded(setup, times, needs, timed), times < longest)
            if len(near.times):
                needs = np.asarray(least_of_ends(near.setup, self.cluster))
                found.append(taken(replace(near, needs=needs), needs <= self.room))
        return found

    def _played(self, layouts: Sequence[Bounded]) -> list[Bounded]:
        """The same layouts with the times of their steps, played."""
        costs = [Costs.of(each.setup, self.cluster) for each in layouts]
        times = step_times(costs, [each.timed for each in layouts])
        found = [replace(each, times=taking) for each, taking in zip(layouts, times, strict=True)]
        self.timed += found
        self.played += sum(map(len, times))
        return found

    def _that_fit(self, timed: Bounded) -> list[Planned]:
        """Of layouts whose steps were played, those whose memory fits when it is played."""
        if not len(timed.times):
            return []
        needed = memory(timed.setup, self.cluster)
        small = np.flatnonzero(fits(needed, self.cluster))
        found = [
            Planned(*taken((timed.setup, needed), place), self.cluster, float(timed.times[place]))
            for place in small
        ]
        self.fitting += found
        return found

    def front(self) -> list[Planned]:
        """From the leanest to the fastest of what was played."""
        while len((places := _leaner(self.timed, _on_front(self.fitting)))[0]):
            for number, place in zip(*places, strict=True):
                each = self.timed[number]
                found = self._that_fit(taken(each, [place]))
                each.needs[place] = float(found[0].memory.device) if found else np.inf
        front = _on_front(self.fitting)
        return [front[place] for place in _spread_over(len(front), FRONT)]

    def leanest(self) -> Planned | None:
        """Where nothing fits: the layout that needs the least memory."""
        groups = self.splits or self.too_large
        least = np.sort(np.concatenate([[], *(part.needs for part in groups)]))[: 10 * LEANEST][-1:]
        layouts = [
            setup
            for splits in (taken(part.setup, part.needs <= least) for part in groups)
            for setup in data_splits(splits, self.choices)
        ]
        bounds = [np.asarray(least_of_ends(setup, self.cluster)) for setup in layouts]
        least = np.sort(np.concatenate([[], *bounds]))[:LEANEST][-1:]
        found = []
        for setup in (taken(s, b <= least) for s, b in zip(layouts, bounds, strict=True)):
            if np.size(setup.pp):
                needs = np.broadcast_to(memory(setup, self.cluster).device, np.size(setup.pp))
                self.played += len(needs)
                found.append((float(needs.min()), taken(setup, int(needs.argmin()))))
        if not found:
            return None
        _, setup = min(found, key=lambda each: each[0])
        return planned_alone(setup, self.cluster)


def _picked(groups: Sequence[Bounded], group: Places, row: Places) -> list[Bounded]:
    """The layouts at these rows of these groups."""
    return [taken(groups[number], row[group == number]) for number in np.unique(group)]


def _in_order(groups: Sequence[Bounded]) -> tuple[Array, Array, Places, Places]:
    """Of all layouts the bounds of their times, those of memory, their groups and their rows there.

    The least time comes first; of equal ones, the least memory.
    """
    times = np.concatenate([np.empty(0), *(each.times for each in groups)])
    needs = np.concatenate([np.empty(0), *(each.needs for each in groups)])
    sizes = [len(each.times) for each in groups]
    group = np.repeat(np.arange(len(sizes)), sizes)
    row = np.arange(len(times)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    order = np.lexsort((needs, times))
    return times[order], needs[order], group[order], row[order]


def _on_front(planned: Sequence[Planned]) -> list[Planned]:
    """From the leanest to the fastest: each is faster than all that need less memory."""
    found: list[Planned] = []
    for each in sorted(planned, key=lambda p: (float(p.memory.device), p.step_time)):
        if not found or each.step_time < found[-1].step_time:
            found.append(each)
    return found


def _within(rooms: Array, groups: Sequence[Bounded], count: int) -> list[Bounded]:
    """Of the layouts that may do with each of these sizes of memory, the `count` fastest."""
    _, needs, group, row = _in_order(groups)
    some = np.unique(np.concatenate([np.flatnonzero(needs <= room)[:count] for room in rooms]))
    return _picked(groups, group[some], row[some])


def _leaner(groups: Sequence[Bounded], front: Sequence[Planned]) -> tuple[Places, Places]:
    """Some layouts that need less memory than all that are faster, those of a front among them.

    By their bounds, and to the leanest: their groups, and rows there.
    """
    times, needs, group, row = _in_order(groups)
    known = np.array([np.inf, *(float(planned.memory.device) for planned in front[::-1])])
    faster = np.searchsorted([planned.step_time for planned in front[::-1]], times, side="right")
    least = np.minimum(np.minimum.accumulate(np.append(np.inf, needs))[:-1], known[faster])
    leaner = np.flatnonzero(needs < LEANER * least)
    some = leaner[_spread_over(len(leaner), FRONT)]
    return group[some], row[some]


def _spread_over(count: int, some: int) -> Places:
    """At most `some` places of `count`, the first and the last among them."""
    places: Places = np.unique(np.linspace(0, count - 1, min(count, some)).astype(int))
    return places
