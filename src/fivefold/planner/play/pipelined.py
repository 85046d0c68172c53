"""A pipeline's step with the data axis' messages: the stages' computations, and what is sent beside them.

Weights that stay for the step are gathered at its start, stage after stage of a rank: those of the first
stage of all while it computes, the others before their first micro-batch has come. Weights that are freed are
gathered for each pass, which has that in its time. Behind a stage's last backward its gradients are reduced,
one stage of a rank after the other, while the rank goes on computing others.
"""

from typing import NamedTuple

import numpy as np

from fivefold.ledger.setup import Figure
from fivefold.planner.play.computations import Computations, Durations
from fivefold.planner.play.passes import Part, Streams, backward_passes, forward_passes
from fivefold.planner.play.timed import Array, Order, Timed
from fivefold.planner.play.zero_bubble import any_computations


class Stages(NamedTuple):
    """Seconds of stages, [stages, layouts].

    gathers     of its weights at the start of the step, all of them
    reductions  of a stage's gradients, all of them; `tail`: of the last ones
    early       how long before the end of its last backward the first gradients are reduced
    unhidden    what is sent while nothing is computed
    """

    forward: Array
    backward_input: Array
    backward_weight: Array
    first_forward: Array
    gathers: Array
    reductions: Array
    tail: Array
    early: Array
    unhidden: Array

    def durations(self, order: Order, transfer: Figure) -> Durations:
        """For the first stage the gathering of weights is in the time of its first forward."""
        ready = np.zeros_like(self.gathers)
        for rank in range(order.ranks):
            mine = [stage for stage in order.stages(rank) if stage > 0]
            ready[mine] = np.cumsum(self.gathers[mine], axis=0)
        first = np.concatenate([self.first_forward[:1], self.forward[1:]])
        return Durations(self.forward, self.backward_input, self.backward_weight, transfer, first, ready)


class Reduction(NamedTuple):
    """The messages of one stage's gradients, from when to when; [layouts]."""

    stage: int
    start: Array
    end: Array


class Pipelined:
    """One step of layouts with one order.

    ends        [computations, layouts] when each computation ends
    reductions  rank -> of its stages, in the order in which they end
    """

    def __init__(self, order: Order, stages: Stages, transfer: Figure):
        self.order, self.stages, self.durations = order, stages, stages.durations(order, transfer)
        numbers = order.ranks, order.played, order.virtual_stages
        self.computations: Computations = any_computations(order.schedule, *numbers, self.durations)
        self.ends = self.computations.ends(self.durations)
        self.reductions = [self._reductions(rank) for rank in range(order.ranks)]

    def _reductions(self, rank: int) -> list[Reduction]:
        found = []
        sent: Array = np.zeros(self.ends.shape[-1])
        for stage, last in self.computations.last_backwards[rank]:
            ended = self.ends[last]
            start = np.maximum(sent, ended - self.stages.early[stage])
            sent = np.maximum(start + self.stages.reductions[stage], ended + self.stages.tail[stage])
            found.append(Reduction(stage, start, sent))
        return found

    def rank_end(self, rank: int) -> Array:
        """When a rank has computed everything and reduced its gradients."""
        computed = self.ends[self.computations.rows[rank][-1]]
        mine = self.reductions[rank]
        behind = sum(np.maximum(np.minimum(one.end, computed) - one.start, 0.0) for one in mine)
        unhidden = sum(self.stages.unhidden[one.stage] for one in mine)
        return np.asarray(np.maximum(computed + self.order.slowdown * behind, mine[-1].end) + unhidden)

    @property
    def end(self) -> Array:
        """When the last rank has."""
        return np.asarray(np.maximum.reduce([self.rank_end(rank) for rank in range(self.order.ranks)]))


def stages_of(order: Order, timed: Timed) -> Stages:
    """The stages' times, each played through its parts."""
    loads = list(dict.fromkeys(order.loads))
    known = [_stage(timed.parts(load), timed.at_once, order.slowdown) for load in loads]
    size, which = np.size(timed.transfer), [loads.index(load) for load in order.loads]
    columns = ([np.broadcast_to(figure, size) for figure in column] for column in zip(*known, strict=True))
    return Stages(*(np.stack(column)[which] for column in columns))


def _stage(parts: list[Part], at_once: bool | Array, slowdown: float) -> tuple[Figure, ...]:
    """One stage, as the fields of `Stages`."""
    if not parts:  # other programs may leave a stage with the loss alone
        return (0.0,) * len(Stages._fields)
    first, forward, backward = (
        Streams(slowdown).computing(passes)
        for passes in (
            forward_passes(parts),
            forward_passes(parts, first=False),
            backward_passes(parts, first=False, reduces=False),
        )
    )
    weight = sum(part.weight for part in parts)
    gathers = sum(part.gathers.with_once - part.gathers.without for part in parts)
    reductions = [part.reductions.with_once for part in parts]
    tail = np.where(at_once, reductions[0], sum(reductions))
    early = np.where(at_once, np.minimum(backward - parts[-1].backward, sum(reductions)), 0.0)
    unhidden = sum(part.unhidden for part in parts)
    return forward, backward - weight, weight, first, gathers, sum(reductions), tail, early, unhidden
