"""An average over replicas on its way: started, and fetched some steps later while training goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.comm.buckets import PlainSum
from fivefold.comm.compression import CompressedSum, Residual


class LostReplicaError(RuntimeError):
    """An average did not come, since the link to another replica is broken."""


class Flight:
    """The average over `group` of one rank's `differences`, which sit at `indices` of its weights.

    started  after which step
    fragment which of them it is; -1 of one that was saved
    before   the weights as they were then, one for each index
    figures  numbers to be summed over replicas beside it, float64; and then their sums, when it has come
    lost     with `feedback`, when it has come: what compression left out of this rank's part, alike
    finite   whether each of the differences was, as far as anybody has looked
    """

    def __init__(
        self,
        started: int,
        fragment: int,
        buckets: Sequence[Sequence[int]],
        differences: Sequence[Sequence[Tensor]],
        before: Sequence[Tensor],
        figures: Tensor,
        group: dist.ProcessGroup,
        compress: str = "none",
        feedback: bool = False,
    ):
        self.started, self.fragment, self.ranks = started, fragment, group.size()
        self.compressed = compress != "none"
        others = [
            f"replica {replica} (rank {rank})"
            for replica, rank in enumerate(dist.get_process_group_ranks(group))
            if rank != dist.get_rank()
        ]
        self._others = " or ".join(others)
        self.indices = [index for bucket in buckets for index in bucket]
        self.before = list(before)
        self.figures: list[float] | None = None
        self.finite: list[Tensor] = []
        self.lost: list[Tensor] = []
        self.waited_s = 0.0
        self._shapes = [[each.shape for each in bucket] for bucket in differences]
        self.added = False
        flat = [torch.cat([each.flatten() for each in bucket]) for bucket in differences]
        self._residuals = [Residual(each.numel(), each.device) for each in flat] if feedback else []
        self._sums: list[PlainSum | CompressedSum] = []
        for number, each in enumerate(flat):
            residual = self._residuals[number] if feedback else None
            plain = compress == "none"
            sum_ = PlainSum(each, group) if plain else CompressedSum(each, group, compress, residual)
            self._sums.append(sum_)
        self._told = PlainSum(figures, group)
        self._averages: list[Tensor] | None = None

    @classmethod
    def arrived(
        cls,
        started: int,
        indices: list[int],
        averages: list[Tensor],
        before: list[Tensor],
        lost: list[Tensor],
    ) -> Flight:
        """One that is here already: it was waited for when the run was saved."""
        found = cls.__new__(cls)
        found.started, found.fragment, found.indices = started, -1, indices
        found.before, found.lost, found._averages, found.compressed = before, lost, averages, False
        found.figures, found.finite, found.waited_s, found.added = [], [], 0.0, True
        return found

    @property
    def here(self) -> bool:
        """Whether it has been fetched."""
        return self._averages is not None

    def add(self) -> None:
        """When about half of the time is over: a compressed sum takes two messages. This sends the second."""
        if not self.added:
            self.added = True
            with self._or_lost():
                for each in self._sums:
                    each.add()

    def averages(self) -> list[Tensor]:
        """The averages, one for each index. Waits for replicas that are behind; raises `LostReplicaError`."""
        if self._averages is None:
            began = time.perf_counter()
            self.add()
            with self._or_lost():
                flat = [each.result().div_(self.ranks) for each in self._sums]
                self.figures = self._told.result().tolist()
            self.waited_s = time.perf_counter() - began
            self._sums = []
            self._averages = self._in_pieces(flat)
            self.lost = self._in_pieces([each.value for each in self._residuals])
        return self._averages

    def _in_pieces(self, flat: Sequence[Tensor]) -> list[Tensor]:
        """Buckets, or none at all, cut into tensors: one for each index."""
        return [
            part.view(shape)
            for whole, shapes in zip(flat, self._shapes, strict=bool(flat))
            for part, shape in zip(_cut(whole, [shape.numel() for shape in shapes]), shapes, strict=True)
        ]

    @contextmanager
    def _or_lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostReplicaError(
                f"{self._others} did not send its part of the average of step {self.started}: {error}"
            ) from error


def _cut(flat: Tensor, sizes: list[int]) -> list[Tensor]:
    return [flat[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
