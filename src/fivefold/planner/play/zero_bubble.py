"""zb-1p and zb-2p: schedules that are searched for, given how long everything takes.

The Zero Bubble paper (arXiv 2401.10241, section 3) leaves the order of computations to a search with a limit
on memory: as much as p micro-batches take under zb-1p, twice as much under zb-2p. Ours is greedy. Whenever a
rank is free it takes a backward-input if one is ready, else a forward if memory allows, else a weight half to
fill the gap. Two questions have no answer that is always right, so every answer is tried and the fastest
order kept: whether forward and backward take turns while both are ready, and how much a weight half may delay
what is about to arrive.
"""

import heapq
import itertools
import math
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from fivefold.planner.play.computations import Computations, Durations, computations
from fivefold.schedules import Action, Kind, schedule_named
from fivefold.schedules.actions import COMPUTATIONS

KEPT_FOR_WEIGHTS = 0.5
"""Of a micro-batch's activations, what stays after its backward-input: the inputs of matrix products.
Assumed: anything from 0.2 to 0.5 gives the paper's bubbles, all of it (1.0) does not (docs/simulate.md)."""
DELAYS = (0.0, 0.25, 0.5, 0.75, 1.0)


def any_computations(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, durations: Durations
) -> Computations:
    """Of one step of a schedule, in its own order or in one that is searched for.

    durations  of its stages, `ranks` x `virtual_stages` of them
    """
    limit = schedule_named(schedule).memory_limit
    if limit is None:
        return computations(schedule, ranks, micro_batches, virtual_stages)
    return Computations(search(limit, ranks, micro_batches, durations))


def search(
    limit: int,
    ranks: int,
    micro_batches: int,
    durations: Durations,
    kept_for_weights: float = KEPT_FOR_WEIGHTS,
) -> list[list[Action]]:
    """What every rank computes, in the fastest order found for these durations.

    limit  of memory, in micro-batches for each rank of the pipeline
    """
    found = (
        _Greedy(limit, ranks, micro_batches, durations, kept_for_weights, turns, delay).orders()
        for turns, delay in itertools.product((False, True), DELAYS)
    )
    return min(found, key=lambda orders: Computations(orders).longest(durations))


@dataclass
class _Rank:
    """How far one rank has come. `activations` and `gradients`: when the next ones arrive, in order."""

    free_at: float = 0.0
    forward_last: bool = False
    done: Counter[Kind] = field(default_factory=Counter)
    activations: deque[float] = field(default_factory=deque)
    gradients: deque[float] = field(default_factory=deque)
    order: list[Action] = field(default_factory=list)


@dataclass
class _Greedy:
    """One greedy choice of an order, played in the order of time."""

    limit: int
    count: int
    micro_batches: int
    durations: Durations
    kept: float
    turns: bool
    delay: float

    def __post_init__(self) -> None:
        self.ranks = [_Rank() for _ in range(self.count)]
        self.ranks[0].activations.extend([0.0] * self.micro_batches)
        self.moments = [(0.0, number) for number in range(self.count)]
        self.taking = dict(zip(COMPUTATIONS, self.durations.table()[..., 0].tolist(), strict=False))
        self.transfer = float(np.ravel(self.durations.transfer)[0])

    def orders(self) -> list[list[Action]]:
        while self.moments:
            now, number = heapq.heappop(self.moments)
            if now >= self.ranks[number].free_at:  # else it was woken while it computed
                self.decide(number, now)
        return [rank.order for rank in self.ranks]

    def decide(self, number: int, now: float) -> None:
        """Begin what is best now, or wait for what comes next."""
        rank = self.ranks[number]
        forward, backward = self.next_forward(number), next(iter(rank.gradients), math.inf)
        comes = min(forward, backward)
        its_turn = self.turns and not rank.forward_last
        length = self.taking["backward-weight"][number]
        fits_in_gap = now + length - comes <= self.delay * length
        if forward <= now and (its_turn or backward > now):
            self.begin("forward", number, now)
        elif backward <= now:
            self.begin("backward-input", number, now)
        elif rank.done["backward-weight"] < rank.done["backward-input"] and fits_in_gap:
            self.begin("backward-weight", number, now)
        elif comes < math.inf:
            heapq.heappush(self.moments, (comes, number))

    def next_forward(self, number: int) -> float:
        """When the next forward can start; never, as long as there is no memory for it."""
        rank = self.ranks[number]
        ahead = rank.done["forward"] - rank.done["backward-input"]
        memory = ahead + self.kept * (rank.done["backward-input"] - rank.done["backward-weight"])
        # A rank nearer to the end gets its gradients sooner; more forwards would only take memory.
        if ahead >= self.limit * (self.count - number) or memory + 1 > self.limit * self.count:
            return math.inf
        return next(iter(rank.activations), math.inf)

    def begin(self, kind: Kind, number: int, now: float) -> None:
        """Put an action down, and send what it makes to the rank that waits for it."""
        rank = self.ranks[number]
        rank.order.append(Action(kind, number, rank.done[kind]))
        rank.done[kind] += 1
        rank.free_at = end = now + self.taking[kind][number]
        heapq.heappush(self.moments, (end, number))
        if kind == "backward-weight":
            return
        rank.forward_last = kind == "forward"
        (rank.activations if rank.forward_last else rank.gradients).popleft()
        if kind == "forward" and number + 1 < self.count:
            self.arrive(self.ranks[number + 1].activations, number + 1, end + self.transfer)
        elif kind == "forward":
            self.arrive(rank.gradients, number, end)
        elif number > 0:
            self.arrive(self.ranks[number - 1].gradients, number - 1, end + self.transfer)

    def arrive(self, where: deque[float], number: int, when: float) -> None:
        """Something is on its way to a rank, which looks again when it comes."""
        where.append(when)
        heapq.heappush(self.moments, (when, number))
