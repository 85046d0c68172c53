"""The best layouts of a job on a cluster: all are bounded, and what could be among the best is played.

Bounds are never above what is played (`bounds.py`). So layouts are played in the order of their bounds, until
the next bound is above the times that were found: no layout that was not played is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fivefold.hardware.cluster import Cluster
from fivefold.ledger.setup import Setup
from fivefold.planner.goal import Goal
from fivefold.planner.keys import in_keys
from fivefold.planner.memory.fullest_rank import Memory, counted_on, fits, memory
from fivefold.planner.play.arrays import taken
from fivefold.planner.play.step_time import Breakdown, breakdown, step_times
from fivefold.planner.play.timed import Timed
from fivefold.planner.search.bounds import least_time, least_with_messages
from fivefold.planner.search.candidates import EVERYTHING, Choices, candidates
from fivefold.planner.search.known_parts import KnownParts
from fivefold.planner.search.memory_bounds import least_memory, least_of_ends
from fivefold.planner.time.parts import Costs

BATCH, TOGETHER = 512, 48
"""How many layouts are looked at more closely at first, each time twice as many; and how many are played
together."""
NEAR, FAR = 1.03, 2.0
"""Layouts are played that may be so many times as slow as the best; the second, until enough are found."""
LEANEST = 300
"""Where nothing fits, of how many layouts with the least bound of memory the memory is played."""
FRONT = 12
"""Of the layouts from the leanest to the fastest, how many are shown, and by their bounds played."""
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
        return tuple(int(getattr(self.setup, name)) for name in DEGREES)

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


def search(
    goal: Goal,
    cluster: Cluster,
    choices: Choices = EVERYTHING,
    best: int = 6,
    keep: Callable[[Setup], Mask] | None = None,
) -> SearchResult:
    """The `best` layouts for a goal. `keep` leaves only some of the candidates, by a mask over a setup."""
    started = time.perf_counter()
    pool = Pool(cluster)
    for setup in candidates(goal, choices):
        if keep is not None:
            setup = taken(setup, keep(setup))
        if not (setup.runs_like_zero_1 and 1 in choices.zero):
            pool.add(setup)
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
    """Layouts of one structure, with the bounds of their times and of the memory they need."""

    setup: Setup
    times: Array
    needs: Array


class Pool:
    """Layouts that may be played, by their bounds.

    fitting  what was played and fits
    """

    def __init__(self, cluster: Cluster):
        self.cluster, self.parts = cluster, KnownParts(cluster)
        self.room = counted_on(cluster) * GIB
        self.groups: list[Bounded] = []
        self.too_large: list[Bounded] = []
        self.fitting: list[Planned] = []
        self.bounded = self.played = 0

    def add(self, setup: Setup) -> None:
        """Bound the layouts of a setup."""
        self.bounded += np.size(setup.pp)
        if not np.size(setup.pp):
            return
        needs = np.asarray(least_memory(setup, self.cluster))
        small = needs <= self.room
        if small.any():
            setup, needs = taken(setup, small), needs[small]
            self.groups.append(Bounded(setup, np.asarray(least_time(self.parts.costs(setup))), needs))
        else:
            least = np.argsort(needs)[:LEANEST]
            self.too_large.append(Bounded(taken(setup, least), 0 * needs[least], needs[least]))

    def fastest(self, count: int) -> list[Planned]:
        """The fastest that fit, one for each set of degrees."""
        bounds, _, group, row = self._in_order()
        best: dict[Degrees, Planned] = {}
        start, size = 0, BATCH
        while start < len(bounds):
            longest = _worth_playing(best, count)
            end = min(start + size, int(np.searchsorted(bounds, longest)))
            if end <= start:
                break
            nearer, *places = self._possible(group[start:end], row[start:end], longest)
            low, together = 0, TOGETHER
            while low < len(nearer):
                some = slice(low, low + together)
                low, together = low + together, 2 * together
                worth = nearer[some] < self._limits(best, count, *(column[some] for column in places))
                for planned in self._play(*(column[some][worth] for column in places)):
                    if planned.step_time <= best.setdefault(planned.degrees, planned).step_time:
                        best[planned.degrees] = planned
            start, size = end, 2 * size
        return sorted(best.values(), key=_time)[:count]

    def _limits(self, best: dict[Degrees, Planned], count: int, group: Places, row: Places) -> Array:
        """Up to which times the layouts at these places are worth playing.

        Of those with the same degrees only the fastest is shown.
        """
        longest = _worth_playing(best, count)
        known = (best.get(degrees) for degrees in self._degrees(group, row))
        return np.array([min(longest, planned.step_time) if planned else longest for planned in known])

    def _possible(self, group: Places, row: Places, longest: float) -> tuple[Array, Places, Places]:
        """Of the layouts at these places, those that may fit and be faster than `longest`.

        With bounds of their times that count messages too, the least first; their groups, and rows there.
        """
        found: list[tuple[Array, Places, Places]] = [(np.empty(0), group[:0], row[:0])]
        for number in np.unique(group):
            here = row[group == number]
            setup = taken(self.groups[number].setup, here)
            costs = self.parts.costs(setup)
            bounds = np.broadcast_to(least_with_messages(costs, Timed.of(costs)), len(here))
            near = bounds < longest
            if near.any():
                near[near] = np.asarray(least_of_ends(taken(setup, near), self.cluster)) <= self.room
                found.append((bounds[near], np.full(int(near.sum()), number), here[near]))
        bounds, groups, rows = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(bounds, kind="stable")
        return bounds[order], groups[order], rows[order]

    def _degrees(self, group: Places, row: Places) -> list[Degrees]:
        """Of the layouts at these places."""
        found = np.empty((len(group), len(DEGREES)), dtype=np.int64)
        for number in np.unique(group):
            here = group == number
            setup = taken(self.groups[number].setup, row[here])
            found[here] = np.stack([getattr(setup, name) for name in DEGREES], axis=-1)
        return list(map(tuple, found.tolist()))

    def _in_order(self) -> tuple[Array, Array, Places, Places]:
        """Of all layouts the bounds of their times, those of memory, their groups and their rows there.

        The least time comes first; of equal ones, the least memory.
        """
        if not self.groups:
            return np.empty(0), np.empty(0), np.empty(0, dtype=int), np.empty(0, dtype=int)
        times, needs = (
            np.concatenate([getattr(g, name) for g in self.groups]) for name in ("times", "needs")
        )
        sizes = [len(part.times) for part in self.groups]
        group = np.repeat(np.arange(len(sizes)), sizes)
        row = np.concatenate([np.arange(size) for size in sizes])
        order = np.lexsort((needs, times))
        return times[order], needs[order], group[order], row[order]

    def _play(self, group: Places, row: Places) -> list[Planned]:
        """The layouts at these places that fit, played."""
        some: list[tuple[Setup, Memory]] = []
        for number in np.unique(group):
            setup = taken(self.groups[number].setup, row[group == number])
            needed = memory(setup, self.cluster)
            self.played += np.size(setup.pp)
            small = np.asarray(fits(needed, self.cluster))
            if small.any():
                some.append((taken(setup, small), taken(needed, small)))
        times = step_times([self.parts.costs(setup) for setup, _ in some])
        found = [
            Planned(*taken((setup, needed), place), self.cluster, float(seconds))
            for (setup, needed), taking in zip(some, times, strict=True)
            for place, seconds in enumerate(taking)
        ]
        self.fitting += found
        return found

    def front(self) -> list[Planned]:
        """From the leanest to the fastest, of all that were played; some are played for it."""
        _, needs, group, row = self._in_order()
        # Those that need less than all that are faster, by their bounds; of these some, to the leanest.
        lean = np.flatnonzero(np.diff(np.minimum.accumulate(needs), prepend=np.inf) < 0)
        some = lean[_spread_over(len(lean), FRONT)]
        self._play(group[some], row[some])
        found: list[Planned] = []
        for planned in sorted(self.fitting, key=lambda p: (float(p.memory.device), p.step_time)):
            if not found or planned.step_time < found[-1].step_time:
                found.append(planned)
        return [found[place] for place in _spread_over(len(found), FRONT)]

    def leanest(self) -> Planned | None:
        """Where nothing fits: the layout that needs the least memory."""
        groups = self.groups or self.too_large
        if not groups:
            return None
        least = np.sort(np.concatenate([part.needs for part in groups]))[:LEANEST][-1]
        found = []
        for setup in (taken(part.setup, part.needs <= least) for part in groups):
            if np.size(setup.pp):
                needs = np.broadcast_to(memory(setup, self.cluster).device, np.size(setup.pp))
                self.played += len(needs)
                found.append((float(needs.min()), taken(setup, int(needs.argmin()))))
        _, setup = min(found, key=lambda each: each[0])
        return planned_alone(setup, self.cluster)


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
