"""The outer step: how far replicas have come on average moves the outer weights, and they the replicas'.

With the outer weights a, the momentum m, and a replica's weights w, for each parameter by itself:

    start    d = a - w              on every replica: what it did since the last start
             b = w
    average  g = mean of d over replicas, which may take some steps in which w goes on
    apply    m = mu m + g
             a = a - lr (g + mu m)  as torch.optim.SGD with Nesterov momentum
             w = a + (w - b)        the replica keeps what it did while the average was on its way;
                                    with a mix of x: w = x w + (1 - x) (a + (w - b))

What compression leaves out of d, r, stays with the replica: w = a + (w - b) - r, so that the next d has it.

Without a delay w is b, and every replica goes on from the outer weights, exactly. Where an average is started
while others are on their way, d is what was done since the latest of them: its b takes the place of a.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.axes.outer import outer_buckets
from fivefold.axes.pieces import pieces
from fivefold.axes.runtime.mesh import Mesh
from fivefold.config import Job
from fivefold.ledger.setup import Setup
from fivefold.training.flight import Flight
from fivefold.training.weights import Weights


class OuterStep:
    """One rank's outer weights, momentum and averages on their way, for what it keeps of each parameter.

    anchors  the outer weights, one per master
    momenta  alike; None without momentum
    flights  averages on their way, the oldest first
    """

    def __init__(self, job: Job, weights: Weights, mesh: Mesh):
        settings = job.communication
        group = mesh.group("dp_replicate")
        assert group is not None
        assert settings.outer_lr is not None
        self.group = group
        self.lr, self.momentum = settings.outer_lr, settings.outer_momentum
        self.compress = settings.compress
        self.feedback = settings.compress != "none" and settings.error_feedback
        self.weights = weights
        self.anchors = [master.detach().clone() for master in weights.masters]
        self.momenta = [torch.zeros_like(anchor) for anchor in self.anchors] if self.momentum else None
        self.flights: list[Flight] = []
        sizes = [anchor.numel() for anchor in self.anchors]
        self.buckets = outer_buckets(Setup.of(job), pieces(job, mesh.place), sizes)

    @torch.no_grad()
    def begin(self) -> None:
        """Let the outer weights be the weights as they are now, with nothing on its way."""
        self.flights = []
        for anchor, master in zip(self.anchors, self.weights.masters, strict=True):
            anchor.copy_(master)
        for momentum in self.momenta or []:
            momentum.zero_()

    def tensors_of(self, index: int) -> list[Tensor]:
        """What is kept for one master: outer weights, momentum, averages on their way."""
        flights = [flight for flight in self.flights if index in flight.indices]
        places = [flight.indices.index(index) for flight in flights]
        return [
            self.anchors[index],
            *([] if self.momenta is None else [self.momenta[index]]),
            *(f.averages()[place] for f, place in zip(flights, places, strict=True)),
            *(f.before[place] for f, place in zip(flights, places, strict=True)),
            *(f.lost[place] for f, place in zip(flights, places, strict=True) if f.lost),
        ]

    def tensors(self) -> list[Tensor]:
        """Every tensor kept on this rank."""
        return [tensor for index in range(len(self.anchors)) for tensor in self.tensors_of(index)]

    @torch.no_grad()
    def differences(self, fragment: int) -> list[list[Tensor]]:
        """By bucket, how far each weight of a fragment has come since its last average was started."""
        from_ = list(self.anchors)
        for flight in self.flights:
            for index, before in zip(flight.indices, flight.before, strict=True):
                from_[index] = before
        masters = self.weights.masters
        return [[from_[index] - masters[index] for index in bucket] for bucket in self.buckets[fragment]]

    @torch.no_grad()
    def start(
        self,
        step: int,
        fragment: int,
        differences: Sequence[Sequence[Tensor]],
        figures: Tensor,
        last: bool = False,
    ) -> None:
        """Send a fragment's differences on their way, after this step, with some numbers beside them.

        last  no average follows that could make up for what compression leaves out
        """
        buckets, masters = self.buckets[fragment], self.weights.masters
        before = [masters[index].detach().clone() for bucket in buckets for index in bucket]
        feedback = self.feedback and not last
        sent = (buckets, differences, before, figures, self.group, self.compress, feedback)
        self.flights.append(Flight(step, fragment, *sent))

    @torch.no_grad()
    def apply(self, flight: Flight, mix: float, short: bool = False) -> None:
        """Move the outer weights by the oldest average, and this replica's with them.

        short  it is of less than a round, at the end of a run: replicas are averaged as they are
        """
        assert flight is self.flights[0]
        averages = flight.averages()
        self.flights.pop(0)
        for place, index in enumerate(flight.indices):
            if short:
                self.anchors[index].sub_(averages[place])
            else:
                self._move(index, averages[place])
            self._follow(index, flight.before[place], flight.lost[place] if flight.lost else None, mix)
        self.weights.publish()

    @torch.no_grad()
    def drop(self, flight: Flight) -> None:
        """Take the oldest average for nothing: replicas go on from the outer weights as they were."""
        self.flights.remove(flight)
        for index in flight.indices:
            self.weights.masters[index].copy_(self.anchors[index])
        self.weights.publish()

    def _move(self, index: int, average: Tensor) -> None:
        if self.momenta is not None and self.momentum:
            momentum = self.momenta[index].mul_(self.momentum).add_(average)
            average = average.add(momentum, alpha=self.momentum)
        self.anchors[index].sub_(average, alpha=self.lr)

    def _follow(self, index: int, before: Tensor, lost: Tensor | None, mix: float) -> None:
        anchor, master = self.anchors[index], self.weights.masters[index]
        moved = anchor + (master - before)
        if lost is not None:
            moved -= lost
        master.copy_(moved.lerp_(master.detach(), mix) if mix else moved)
        for later in self.flights:  # they were started from weights that have now moved
            if index in later.indices:
                place = later.indices.index(index)
                later.before[place] = anchor + (later.before[place] - before)
