"""The best layouts of a job on a cluster: all are bounded, the promising ones computed, the best simulated.

A layout is computed when its bound says that it might be among the best, and the closest of the others too,
until `AT_LEAST` have been: those with a small memory are worth knowing even when they are slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fivefold.hardware.cluster import Cluster
from fivefold.ledger.setup import Setup
from fivefold.planner.goal import Goal
from fivefold.planner.keys import in_keys
from fivefold.planner.memory.fullest_rank import Memory, fits, memory, usable_gib
from fivefold.planner.play.one_layout import simulated_step
from fivefold.planner.search.arrays import taken
from fivefold.planner.search.bounds import least_memory, least_time
from fivefold.planner.search.candidates import EVERYTHING, Choices, candidates
from fivefold.planner.search.known_parts import KnownParts
from fivefold.planner.time.estimate import Estimate, estimate, estimated

AT_LEAST = 22_000
SAFE = 0.85
"""Below this part of a device's memory, a bound of the need is likely to mean that the layout fits."""
LEANEST = 300
"""Where nothing fits, of how many layouts with the least bound of memory the memory is computed."""
VARIANTS, LEADERS = 2, 2
"""Of layouts with equal degrees, how many are simulated, for the first few sets of degrees; then one."""
FRONT = 8
"""Of the layouts between the leanest and the fastest, how many are simulated."""
GIB = 2**30

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, repr=False)
class Planned:
    """One layout, and what it will take.

    step_time  seconds; by event simulation of its schedule where it was among the best, else by `estimate`
    """

    setup: Setup
    estimate: Estimate
    memory: Memory
    step_time: float

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
    computed  layouts whose memory and time were computed
    pruned    layouts that need not be computed: by their bounds too large or too slow, or the same program as
              another
    """

    best: list[Planned]
    front: list[Planned]
    nearest: Planned | None
    computed: int
    pruned: int
    seconds: float

    def __repr__(self) -> str:
        return f"<best of {self.computed:,} layouts: {self.best[0] if self.best else None}>"


def search(
    goal: Goal,
    cluster: Cluster,
    choices: Choices = EVERYTHING,
    best: int = 6,
    keep: Callable[[Setup], Mask] | None = None,
) -> SearchResult:
    """The `best` layouts for a goal. `keep` leaves only some of the candidates, by a mask over a setup."""
    started = time.perf_counter()
    room = usable_gib(cluster.device) * GIB
    pool: list[Bounded] = []
    leanest: list[Bounded] = []
    pruned, parts = 0, KnownParts(cluster)
    for setup in candidates(goal, choices):
        if keep is not None:
            setup = taken(setup, keep(setup))
        if setup.runs_like_zero_1 and 1 in choices.zero:
            pruned += np.size(setup.pp)
            continue
        if not np.size(setup.pp):
            continue
        needs = np.asarray(least_memory(setup, cluster.device.kind))
        least = np.argsort(needs)[:LEANEST]
        leanest.append(Bounded(taken(setup, least), 0 * needs[least], needs[least]))
        small = needs <= room
        pruned += int((~small).sum())
        if small.any():
            times = np.asarray(least_time(parts.costs(setup)))
            pool.append(Bounded(taken(setup, small), times[small], needs[small]))
    computed = Computed(parts)
    if pool:
        # First those that are promising by both bounds: most of them fit.
        times = np.concatenate([np.where(part.needs < SAFE * room, part.times, np.inf) for part in pool])
        pool = computed.add(pool, _nth_least(times, AT_LEAST), SAFE * room)
        # What could still be among the best has a bound below the slowest of them.
        pool = computed.add(pool, computed.nth_best_time(best), np.inf)
        pruned += sum(len(part.times) for part in pool)
    elif leanest:
        needs = np.concatenate([part.needs for part in leanest])
        computed.add(leanest, np.inf, _nth_least(needs, LEANEST))
        pruned -= len(computed.times)
    fastest = computed.best(best)
    if goal.may_compile:
        fastest = sorted((computed.perhaps_compiled(planned) for planned in fastest), key=_time)
    return SearchResult(
        best=fastest,
        front=computed.front(fastest),
        nearest=computed.leanest(),
        computed=len(computed.times),
        pruned=pruned,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True)
class Bounded:
    """Layouts that were not computed, with the bounds of their times and of the memory they need."""

    setup: Setup
    times: npt.NDArray[np.float64]
    needs: npt.NDArray[np.float64]


class Computed:
    """Layouts whose memory and time are known."""

    def __init__(self, known: KnownParts):
        self.known, self.cluster = known, known.cluster
        self.parts: list[tuple[Setup, Estimate, Memory]] = []
        self.index: list[tuple[int, int]] = []
        self.degrees: list[tuple[int, ...]] = []
        self.times = np.empty(0)
        self.needs = np.empty(0)
        self.fits = np.empty(0, dtype=bool)

    def add(self, pool: list[Bounded], longest: float, most: float) -> list[Bounded]:
        """Compute those whose bounds are at most so long and so much; returns the rest."""
        rest = []
        for part in pool:
            near = (part.times <= longest) & (part.needs <= most)
            if not near.all():
                rest.append(taken(part, ~near))
            if near.any():
                self._compute(taken(part.setup, near))
        return rest

    def _compute(self, setup: Setup) -> None:
        taking = estimated(self.known.costs(setup))
        needing = memory(setup, self.cluster)
        count = np.size(setup.pp)
        self.index += [(len(self.parts), row) for row in range(count)]
        self.parts.append((setup, taking, needing))
        degrees = np.stack([setup.data_ranks, setup.cp, setup.tp, setup.pp, setup.ep], axis=-1)
        self.degrees += map(tuple, degrees.tolist())
        self.times = np.concatenate([self.times, np.broadcast_to(taking.step_time, count)])
        self.needs = np.concatenate([self.needs, np.broadcast_to(needing.device, count)])
        self.fits = np.concatenate([self.fits, np.broadcast_to(fits(needing, self.cluster), count)])

    def nth_best_time(self, n: int) -> float:
        """The time below which a layout might be among the best `n`; any may where fewer fit."""
        fitting = self.times[self.fits]
        return _nth_least(fitting, n) if len(fitting) >= n else float("inf")

    def planned(self, number: int) -> Planned:
        part, row = self.index[number]
        return Planned(*taken(self.parts[part], row), float(self.times[number]))

    def best(self, count: int) -> list[Planned]:
        """The fastest that fit, one for each set of degrees, in the order that simulation gives them."""
        fitting = np.flatnonzero(self.fits)
        found: dict[tuple[int, ...], list[Planned]] = {}
        for number in fitting[np.argsort(self.times[fitting], kind="stable")]:
            degrees = self.degrees[number]
            if len(found) == count and degrees not in found:
                break
            same = found.setdefault(degrees, [])
            if len(same) < (VARIANTS if len(found) <= LEADERS else 1):
                same.append(self.planned(number))
        return sorted((min(map(self.simulated, same), key=_time) for same in found.values()), key=_time)

    def simulated(self, planned: Planned) -> Planned:
        seconds = simulated_step(planned.setup, self.cluster)
        return replace(planned, step_time=seconds, estimate=planned.estimate.settled(seconds))

    def perhaps_compiled(self, planned: Planned) -> Planned:
        """The layout compiled, if that is faster; it needs no more memory so.

        Where a schedule cuts backward in two it is not tried: a compiled backward cannot be cut.
        """
        if planned.setup.pipeline.splits_backward:
            return planned
        compiled = planned_alone(replace(planned.setup, compile=True), self.cluster)
        return min(planned, compiled, key=_time)

    def front(self, best: list[Planned]) -> list[Planned]:
        """From the leanest to the fastest, of those that fit: some beside the best, all of them simulated."""
        fitting = np.flatnonzero(self.fits)
        order = fitting[np.lexsort((self.times[fitting], self.needs[fitting]))]
        # Those that are faster than all before them, and of these some from the first to the last.
        faster = order[np.diff(np.minimum.accumulate(self.times[order]), prepend=np.inf) < 0]
        some = np.rint(np.linspace(0, len(faster) - 1, min(len(faster), FRONT))).astype(int)
        others = [self.simulated(self.planned(number)) for number in faster[some]]
        found: list[Planned] = []
        for planned in sorted([*best, *others], key=lambda p: (float(p.memory.device), p.step_time)):
            if not found or planned.step_time < found[-1].step_time:
                found.append(planned)
        return found

    def leanest(self) -> Planned | None:
        """Where nothing fits: the layout that needs the least memory."""
        nothing = self.fits.any() or not len(self.needs)
        return None if nothing else self.planned(int(self.needs.argmin()))


def planned_alone(setup: Setup, cluster: Cluster) -> Planned:
    """What ONE layout takes, its step simulated."""
    seconds = simulated_step(setup, cluster)
    return Planned(setup, estimate(setup, cluster).settled(seconds), memory(setup, cluster), seconds)


def _nth_least(figures: npt.NDArray[np.float64], n: int) -> float:
    """The nth of the figures in order, or the largest where there are fewer."""
    place = min(n, len(figures)) - 1
    return float(np.partition(figures, place)[place])


def _time(planned: Planned) -> float:
    return planned.step_time
