"""The best layouts of a job on a cluster: all are bounded, and what could be among the best is played.

Bounds are never above what is played (`bounds.py`). So layouts are played in the order of their bounds, until
the next bound is above the times that were found: no layout that was not played is faster.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fivefold.hardware.cluster import Cluster
from fivefold.ledger.setup import Setup
from fivefold.planner.goal import Goal
from fivefold.planner.keys import in_keys
from fivefold.planner.memory.fullest_rank import Memory, counted_on, fits, memory
from fivefold.planner.play.arrays import from_table, taken
from fivefold.planner.play.step_time import Breakdown, breakdown, step_times
from fivefold.planner.play.timed import NOTHING, Timed
from fivefold.planner.search.bounds import least_time, least_with_messages
from fivefold.planner.search.candidates import EVERYTHING, Choices, data_splits, model_splits
from fivefold.planner.search.known_parts import KnownParts
from fivefold.planner.search.memory_bounds import least_memory, least_of_ends
from fivefold.planner.time.parts import Costs

BATCH, TOGETHER = 1024, 128
"""How many layouts are looked at more closely at first, each time twice as many; and how many are played
together."""
NEAR, FAR = 1.002, 2.0
"""Layouts are played that may be so many times as slow as the best; the second, until enough are found."""
LEANEST = 300
"""Where nothing fits, of how many layouts with the least bound of memory the memory is played."""
FRONT, LEANER = 12, 0.98
"""Of the layouts from the leanest to the fastest, how many are shown; and what part of a faster one's memory
a layout may need, by its bound, for its own to be played."""
SOME = 32
"""Of how many layouts the memory is played at a time, to fill the table."""
GIB = 2**30

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]
Degrees = tuple[int, ...]
DEGREES = ("data_ranks", "cp", "tp", "pp", "ep")


@dataclass(frozen=True, repr=False)
class Planned:
    """One layout, and what it will take: its step and its memory, both played."""

    setup: Setup
    memory: Memory
    cluster: Cluster
    step_time: float

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where the time of a step goes."""
        return breakdown(Costs.of(self.setup, self.cluster))

    @property
    def degrees(self) -> Degrees:
        return _degrees(self.setup)

    @property
    def tokens_per_second(self) -> float:
        return self.setup.global_batch * self.setup.seq_len / self.step_time

    @property
    def memory_gib(self) -> float:
        """Of the fullest device."""
        return float(self.memory.device) / GIB

    @property
    def keys(self) -> str:
        """The layout in one line: `zero=3,dp_shard=8,micro_batch=2`."""
        return in_keys(self.setup)

    @property
    def brief(self) -> str:
        return f"{self.step_time:.4g} s a step, {self.memory_gib:.1f} GiB"

    def __repr__(self) -> str:
        return f"<{self.keys}: {self.brief}>"


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

    timed  [layouts, figures] what their steps are put together from; not of ways to split the model
    """

    setup: Setup
    times: Array
    needs: Array
    timed: Array


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
            self.splits.append(Bounded(splits, times, needs, timed=needs))
        else:
            least = np.argsort(needs)[:LEANEST]
            self.too_large.append(taken(Bounded(splits, needs, needs, needs), least))

    def fastest(self, count: int) -> list[Planned]:
        """The fastest that fit, one for each set of degrees."""
        bounds, _, group, row = _in_order(self.splits)
        best: dict[Degrees, Planned] = {}
        start, size = 0, BATCH
        while start < len(bounds):
            longest = _worth_playing(best, count)
            end = min(start + size, int(np.searchsorted(bounds, longest)))
            if end <= start:
                break
            self._improve(best, count, self._layouts(group[start:end], row[start:end], longest))
            start, size = end, 2 * size
        self._complete(best, count)
        return sorted(best.values(), key=_time)[:count]

    def _complete(self, best: dict[Degrees, Planned], count: int) -> None:
        """Add layouts of other degrees whose steps were played, though they were too long to be the best."""
        times, _, group, row = _in_order(self.timed)
        for start in range(0, len(times), SOME):
            slowest = sorted([np.inf, *(planned.step_time for planned in best.values())])[:count][-1]
            if times[start] >= slowest:
                break
            some = slice(start, start + SOME)
            for number in np.unique(group[some]):
                here = row[some][group[some] == number]
                _keep_faster(best, self._that_fit(taken(self.timed[number], here)))

    def _improve(self, best: dict[Degrees, Planned], count: int, layouts: Sequence[Bounded]) -> None:
        """Play those of these layouts that may be faster than the best so far of their degrees."""
        bounds, _, group, row = _in_order(layouts)
        start, size = 0, TOGETHER
        while start < len(bounds):
            some = slice(start, start + size)
            limits = _limits(best, count, layouts, group[some], row[some])
            worth = bounds[some] < limits
            _keep_faster(best, self._play(layouts, group[some][worth], row[some][worth], limits[worth]))
            start, size = start + size, 2 * size

    def _layouts(self, group: Places, row: Places, longest: float = np.inf) -> list[Bounded]:
        """Of these ways to split the model, the layouts that may fit and be faster than `longest`.

        The bounds of their times count messages too.
        """
        found = []
        for number in np.unique(group):
            for setup in data_splits(taken(self.splits[number].setup, row[group == number]), self.choices):
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

    def _play(self, layouts: Sequence[Bounded], group: Places, row: Places, limits: Array) -> list[Planned]:
        """The layouts at these places whose steps are shorter than these limits and that fit."""
        places = [np.flatnonzero(group == number) for number in np.unique(group)]
        some = [taken(layouts[group[here[0]]], row[here]) for here in places]
        costs = [Costs.of(each.setup, self.cluster) for each in some]
        times = step_times(costs, [each.timed for each in some])
        some = [replace(each, times=taking) for each, taking in zip(some, times, strict=True)]
        self.timed += some
        self.played += len(row)
        quick = [taken(each, each.times < limits[here]) for each, here in zip(some, places, strict=True)]
        return [planned for each in quick for planned in self._that_fit(each)]

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
        """From the leanest to the fastest of what was played.

        For it the fastest within less and less memory are played too, by their bounds.
        """
        rooms = np.linspace(min(each.needs.min() for each in self.splits), self.room, FRONT)
        layouts = self._layouts(*_within(rooms, self.splits, 32))
        group, row = _within(rooms, layouts, 3)
        self._play(layouts, group, row, np.zeros(len(row)))
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


def _keep_faster(best: dict[Degrees, Planned], found: Sequence[Planned]) -> None:
    """Of each set of degrees the fastest."""
    for planned in found:
        if planned.step_time <= best.setdefault(planned.degrees, planned).step_time:
            best[planned.degrees] = planned


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


def _within(rooms: Array, groups: Sequence[Bounded], count: int) -> tuple[Places, Places]:
    """Of the layouts that may do with each of these sizes of memory, the fastest: their groups and rows."""
    _, needs, group, row = _in_order(groups)
    some = np.unique(np.concatenate([np.flatnonzero(needs <= room)[:count] for room in rooms]))
    return group[some], row[some]


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


def _limits(
    best: dict[Degrees, Planned], count: int, layouts: Sequence[Bounded], group: Places, row: Places
) -> Array:
    """Up to which times the layouts at these places are worth playing.

    Of those with the same degrees only the fastest is shown.
    """
    longest = _worth_playing(best, count)
    setups = (taken(layouts[number].setup, place) for number, place in zip(group, row, strict=True))
    known = (best.get(_degrees(setup)) for setup in setups)
    return np.array([min(longest, planned.step_time) if planned else longest for planned in known])


def _degrees(setup: Setup) -> Degrees:
    """Of one layout."""
    return tuple(int(getattr(setup, name)) for name in DEGREES)


def planned_alone(setup: Setup, cluster: Cluster) -> Planned:
    """What ONE layout takes."""
    [[seconds]] = step_times([Costs.of(setup, cluster)])
    return Planned(setup, memory(setup, cluster), cluster, float(seconds))


def _worth_playing(best: dict[Degrees, Planned], count: int) -> float:
    """Up to which time layouts are played, given the best of each set of degrees that was found so far."""
    times = sorted(planned.step_time for planned in best.values())
    if len(times) < count:
        return FAR * times[0] if times else np.inf
    return min(times[count - 1], NEAR * times[0])


def _spread_over(count: int, some: int) -> Places:
    """At most `some` places of `count`, the first and the last among them."""
    places: Places = np.unique(np.linspace(0, count - 1, min(count, some)).astype(int))
    return places


def _time(planned: Planned) -> float:
    return planned.step_time
