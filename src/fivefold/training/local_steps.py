"""Steps of a replica that trains alone, and when its outer steps are.

Ranks of a replica take steps as a run of their own. After step s the average of fragment f of F is started
where s = f H / F modulo H, with H = `local_steps`, and it is applied `outer_delay` steps later. After the
last step all fragments are averaged and waited for: a run ends with the outer weights, alike on all replicas.
Those whose turn it was not have come less than a round: they are averaged as they are, without momentum.

What ranks ask each other for is agreed on inside a replica in every step. Between replicas a checkpoint is
agreed on with an average, when it is applied: so all ranks know it after the same step, and no step waits for
another replica's. An end cannot wait that long: `ending.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from fivefold.axes.outer import replica_of
from fivefold.axes.runtime.mesh import Mesh
from fivefold.config import Job
from fivefold.data.batch import Batch
from fivefold.models.decoder import Decoder
from fivefold.training.ending import Ending
from fivefold.training.failures import NonFiniteError
from fivefold.training.flight import Flight
from fivefold.training.optimizer import Optimizer
from fivefold.training.outer_step import OuterStep
from fivefold.training.step import OuterResult, Step, StepResult
from fivefold.training.stopping import STOP
from fivefold.training.weights import Weights


@dataclass(frozen=True)
class Rounds:
    """When averages are started and applied, of a run of `last` steps."""

    local_steps: int
    fragments: int
    delay: int
    last: int

    @classmethod
    def of(cls, job: Job) -> Rounds:
        settings = job.communication
        assert settings.fragments is not None
        assert settings.outer_delay is not None
        return cls(settings.local_steps, settings.fragments, settings.outer_delay, job.training.steps)

    def started(self, step: int) -> list[int]:
        """The fragments whose average is started after this step."""
        return [f for f in range(self.fragments) if step == self.last or self.is_turn(f, step)]

    def is_turn(self, fragment: int, step: int) -> bool:
        """Whether a fragment has come a whole round with this step."""
        return step % self.local_steps == fragment * (self.local_steps // self.fragments)

    def half_way(self, started: int) -> int:
        """After which step the second of two messages is sent for an average."""
        return min(started + (self.delay + 1) // 2, self.last)

    def due(self, started: int) -> int:
        """After which step an average is applied that was started after step `started`."""
        return min(started + self.delay, self.last)


class LocalStep(Step):
    """A step of this rank's replica, with the outer steps that are due after it."""

    def __init__(self, job: Job, parts: list[Decoder], weights: Weights, optimizer: Optimizer, mesh: Mesh):
        super().__init__(replica_of(job), parts, weights, optimizer, mesh.replica)
        self.outer = OuterStep(job, weights, mesh)
        self.rounds, self.mix = Rounds.of(job), job.communication.outer_mix or 0.0
        self.replica, self.replicas = mesh.place.dp_replicate, mesh.layout.dp_replicate
        self._waited = 0.0  # for the last average
        self._losses: list[float] = []  # since the last start
        place = mesh.place
        self._speaks = place.speaks_for_sequences and place.dp_shard == 0  # for its replica
        self._ending: Ending | None = None
        self._end: int | None = None
        self._answered = 0  # the last step after which all ranks did what some had asked for

    def __call__(self, batches: list[Batch], lr: float, step: int) -> StepResult:
        self._ending = self._ending or Ending.opened(self.replica, self.replicas)
        if self._speaks and self._ending.asked_elsewhere():
            self.asks += STOP
        result = super().__call__(batches, lr, step)
        if not result.skipped:
            self._losses.append(result.loss)
        self.tell("outer step", 0)
        if result.asked >= STOP and self._end is None:
            self._end = self._ending.agreed(step)
        came, dropped = self._settle(step)
        for fragment in self.rounds.started(step):
            self._start(step, fragment, result.asked % STOP)
        self._losses = [] if self.rounds.started(step) else self._losses
        at_once, dropped_at_once = self._settle(step)
        came, problem = came + at_once, dropped or dropped_at_once
        if problem is not None:
            result = replace(result, skipped=True, problem=problem)
        asked = self._asked(came, step) + STOP * (step == self._end)
        return replace(result, asked=asked, outer=told_by(came))

    def before_all_meet(self, step: int) -> None:
        if self._speaks and self._ending is not None:
            self._ending.waits(step, step + 0.5)

    def _start(self, step: int, fragment: int, asked: float) -> None:
        """Send how far this replica has come, and what others are to know of it."""
        found = self.outer.differences(fragment)
        finite = [torch.isfinite(each).all() for bucket in found for each in bucket]
        bad = torch.zeros(1, dtype=torch.float64, device=self.device)
        if finite:
            bad += ~torch.stack(finite).all()
        if self.mesh.layout.ranks > 1:
            dist.all_reduce(bad, group=self.mesh.everyone)
        loss = math.fsum(self._losses) / max(1, len(self._losses))
        waits = [self._waited if replica == self.replica else 0.0 for replica in range(self.replicas)]
        told = torch.tensor([loss, asked, *waits], dtype=torch.float64)
        self.outer.start(
            step, fragment, found, torch.cat([bad, told.to(self.device)]), step == self.rounds.last
        )
        self.outer.flights[-1].finite = finite

    def _settle(self, step: int) -> tuple[list[Flight], str | None]:
        """Send on the averages that are half-way, and apply those that are due.

        Returns the latter, and what is wrong with one that had to be dropped.
        """
        rounds, flights = self.rounds, self.outer.flights
        came, problem = list[Flight](), None
        for flight in flights:
            if rounds.half_way(flight.started) <= step and not flight.added:
                if flight.compressed:
                    self._before_waiting(step, flight)
                flight.add()
        while flights and rounds.due(flights[0].started) <= step:
            came.append(flight := flights[0])
            self._before_waiting(step, flight)
            flight.averages()
            self._waited = flight.waited_s
            if flight.figures and flight.figures[0] > 0:
                problem = self._not_finite(flight)
                if self.job.resilience.non_finite != "skip":
                    raise NonFiniteError(problem, step)
                self.outer.drop(flight)
            else:
                at_end = flight.started == rounds.last
                short = at_end and not rounds.is_turn(flight.fragment, step)
                self.outer.apply(flight, self.mix if step < rounds.last else 0.0, short)
        return came, problem

    def _before_waiting(self, step: int, flight: Flight) -> None:
        """Others that end may have to know that this replica cannot move without them. It must be true."""
        if self._speaks and self._ending is not None and not flight.here:
            self._ending.waits(step, flight.started)

    def _asked(self, came: list[Flight], step: int) -> float:
        """What ranks of all replicas have asked for, unless it was done since."""
        asked = sum(
            flight.figures[2] for flight in came if flight.figures and flight.started > self._answered
        )
        self._answered = step if asked else self._answered
        return asked

    def _not_finite(self, flight: Flight) -> str:
        """Name the first rank and parameter that came to something not finite. All ranks call it."""
        pairs = zip(flight.indices, flight.finite, strict=True)
        bad = next((self.weights.names[index] for index, finite in pairs if not finite), None)
        mine = bad and f"the weight {bad} on rank {dist.get_rank()} (replica {self.replica})"
        everyone: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        where = " and ".join([place for place in everyone if place][:2])
        return f"step {flight.started}: {where} is not finite."


def told_by(came: list[Flight]) -> OuterResult | None:
    """What replicas told each other with the latest average."""
    figures = next((flight.figures for flight in reversed(came) if flight.figures), None)
    if figures is None:
        return None
    _, loss, _, *waits = figures
    # Who is the last to come waits least.
    lag, slowest = max(waits) - min(waits), waits.index(min(waits))
    return OuterResult(loss / len(waits), came[-1].waited_s, lag, slowest)
