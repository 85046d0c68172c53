"""zb-1p and zb-2p: schedules that are searched for, given how long everything takes.

The Zero Bubble paper (arXiv 2401.10241, section 3) leaves the order of computations to a search with a limit
on memory: as much as p micro-batches take under zb-1p, twice as much under zb-2p. Ours is greedy. Whenever a
rank is free it takes a backward-input if one is ready, else a forward if memory allows, else a weight half to
fill the gap. Two questions have no answer that is always right, so every answer is tried and the fastest
order kept: whether forward and backward take turns while both are ready, and how much a weight half may delay
what is about to arrive.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field

from fivefold.planner.play.timeline import Durations, play
from fivefold.schedules import Action

KEPT_FOR_WEIGHTS = 0.5
"""Of a micro-batch's activations, what stays after its backward-input: the inputs of matrix products.
Assumed: anything from 0.2 to 0.5 gives the paper's bubbles, all of it (1.0) does not (docs/simulate.md)."""
DELAYS = (0.0, 0.25, 0.5, 0.75, 1.0)


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
    return min(found, key=lambda orders: play(orders, durations).step_time)


@dataclass
class _Rank:
    """How far one rank has come. `activations` and `gradients`: when the next ones arrive, in order."""

    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    free_at: float = 0.0
    forward_last: bool = False
    activations: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    order: list[Action] = field(default_factory=list)


class _Greedy:
    """One greedy choice of an order, played in the order of time."""

    def __init__(
        self,
        limit: int,
        ranks: int,
        micro_batches: int,
        durations: Durations,
        kept: float,
        turns: bool,
        delay: float,
    ):
        self.limit, self.count, self.durations = limit, micro_batches, durations
        self.kept, self.turns, self.delay = kept, turns, delay
        self.ranks = [_Rank() for _ in range(ranks)]
        self.ranks[0].activations = [0.0] * micro_batches
        self.moments = [(0.0, number) for number in range(ranks)]

    def orders(self) -> list[list[Action]]:
        while self.moments:
            now, number = heapq.heappop(self.moments)
            if now >= self.ranks[number].free_at:  # else it was woken while it computed
                self.decide(number, now)
        return [rank.order for rank in self.ranks]

    def decide(self, number: int, now: float) -> None:
        """Begin what is best now, or wait for what comes next."""
        rank = self.ranks[number]
        forward = self.next_forward(number)
        backward = _at(rank.gradients, rank.backwards)
        its_turn = self.turns and not rank.forward_last
        if forward <= now and (its_turn or backward > now):
            self.run_forward(number, now)
        elif backward <= now:
            self.run_backward(number, now)
        elif rank.weights < rank.backwards and self.fits_in_gap(number, now, min(forward, backward)):
            self.run_weight(number, now)
        elif min(forward, backward) < math.inf:
            heapq.heappush(self.moments, (min(forward, backward), number))

    def next_forward(self, number: int) -> float:
        """When the next forward can start; never, as long as there is no memory for it."""
        rank = self.ranks[number]
        ahead = rank.forwards - rank.backwards
        memory = ahead + self.kept * (rank.backwards - rank.weights)
        # A rank nearer to the end gets its gradients sooner; more forwards would only take memory.
        if ahead >= self.limit * (len(self.ranks) - number) or memory + 1 > self.limit * len(self.ranks):
            return math.inf
        return _at(rank.activations, rank.forwards)

    def fits_in_gap(self, number: int, now: float, comes: float) -> bool:
        length = self.durations.backward_weight[number]
        return now + length - comes <= self.delay * length

    def run_forward(self, number: int, now: float) -> None:
        rank = self.ranks[number]
        end = self.begin(number, Action("forward", number, rank.forwards), now)
        rank.forwards += 1
        rank.forward_last = True
        if number + 1 < len(self.ranks):
            self.arrive(self.ranks[number + 1].activations, number + 1, end + self.durations.transfer)
        else:
            self.arrive(rank.gradients, number, end)

    def run_backward(self, number: int, now: float) -> None:
        rank = self.ranks[number]
        end = self.begin(number, Action("backward-input", number, rank.backwards), now)
        rank.backwards += 1
        rank.forward_last = False
        if number > 0:
            self.arrive(self.ranks[number - 1].gradients, number - 1, end + self.durations.transfer)

    def run_weight(self, number: int, now: float) -> None:
        rank = self.ranks[number]
        self.begin(number, Action("backward-weight", number, rank.weights), now)
        rank.weights += 1

    def begin(self, number: int, action: Action, now: float) -> float:
        """Put an action down; returns when it ends."""
        rank = self.ranks[number]
        rank.order.append(action)
        rank.free_at = now + self.durations.of(action.kind, number)
        heapq.heappush(self.moments, (rank.free_at, number))
        return rank.free_at

    def arrive(self, where: list[float], number: int, when: float) -> None:
        """Something is on its way to a rank, which looks again when it comes."""
        where.append(when)
        heapq.heappush(self.moments, (when, number))


def _at(arrivals: list[float], position: int) -> float:
    return arrivals[position] if position < len(arrivals) else math.inf
