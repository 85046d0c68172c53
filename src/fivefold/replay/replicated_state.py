"""Gradients of one rank on a tape under zero 0: see `step`.

The counterpart of `training/weights.py` and `comm/buckets.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fivefold.axes.data import replicated_buckets
from fivefold.axes.layout import Place
from fivefold.axes.pieces import EMBEDDING, pieces
from fivefold.ledger.precision import precision_named
from fivefold.ledger.setup import Setup
from fivefold.replay.graph import Arrived, Tensor
from fivefold.replay.layers_program import Layer
from fivefold.replay.operations import Operations
from fivefold.replay.sizes import passes

if TYPE_CHECKING:
    from fivefold.config import Job


class Replicated:
    """Gradients under zero 0: of the masters, one by one, until a bucket of them is full and is summed.

    last, gathered  as of `Sharded`: no micro-batch differs from another, and weights are always there
    """

    last, gathered = False, 0

    def __init__(self, t: Operations, job: Job, place: Place):
        self.t, self.precision = t, precision_named(job.training.precision)
        self.pieces = pieces(job, place)
        self.gradients: dict[int, Tensor] = {}
        self.flats: list[Tensor] = []
        self.waiting: dict[int, Tensor] | None = None
        self.buckets = [bucket for _, some in replicated_buckets(job, self.pieces) for bucket in some]
        self.bucket_of = {index: number for number, bucket in enumerate(self.buckets) for index in bucket}
        self.missing = [len(bucket) * passes(Setup.of(job)) for bucket in self.buckets]

    def arrivals(self, part: str) -> Callable[[str], Arrived]:
        """For one part of the model: what happens to the gradients of its parameters."""
        return lambda name: partial(self._arrived, self._find(part, name))

    def _find(self, part: str, name: str) -> int:
        names = {f"{part}.{name}"}
        if name == "output.weight":  # a tied one, on a stage without the embedding
            names.add(EMBEDDING)
        return next(i for i, p in enumerate(self.pieces) if p.part == part and p.name in names)

    def _arrived(self, index: int, found: list[Tensor]) -> None:
        """Move a gradient to the master's, adding up micro-batches there."""
        if self.waiting is not None:
            self.waiting[index] = found.pop()
            return
        if index not in self.gradients:
            self.gradients[index] = self.t.cast(found[0], self.precision.master_bytes)
        found.clear()
        if index in self.bucket_of:
            number = self.bucket_of[index]
            self.missing[number] -= 1
            if self.missing[number] == 0:
                size = sum(self.pieces[member].count for member in self.buckets[number])
                self.flats.append(self.t.empty(size, self.precision.reduce_bytes))
                for member in self.buckets[number]:
                    del self.gradients[member]

    def around(self, part: str, layer: Layer) -> Layer:
        """Nothing happens around a layer whose weights are always there."""
        return layer

    def before_schedule(self) -> None:
        """Nothing is gathered."""

    def after_forward(self) -> None:
        """Nothing was put off."""

    def reduce(self, stage: int) -> None:
        """Buckets go by themselves, when they are full."""

    def before_weights(self) -> None:
        """Weights' gradients are computed apart: they reach the masters when all are there."""
        self.waiting = {}

    def after_weights(self) -> None:
        waiting, self.waiting = self.waiting or {}, None
        for index in sorted(waiting):
            self._arrived(index, [waiting.pop(index)])

    def after_backward(self) -> None:
        """Nothing is left to do."""
