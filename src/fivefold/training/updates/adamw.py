"""AdamW in one pass: gradient, master weight and moments are read once, and written once.

On a GPU by a kernel (`kernels.py`), which needs Triton; elsewhere by torch's operations (`operations.py`).
"""

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from fivefold.config import Job
from fivefold.training.updates import operations, stochastic
from fivefold.training.updates.operations import Numbers, Operands
from fivefold.training.updates.places import Places
from fivefold.training.weights import Weights, local

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """AdamW of our own. See `update.Update`."""

    kinds: Sequence[str] = MOMENTS
    publishes = True
    counted = True

    def __init__(self, job: Job, weights: Weights, indices: Sequence[int], dtype: torch.dtype):
        """`dtype`: of the moments, float32, bfloat16 or uint8 for codes; masters are in float32."""
        self.settings, self.seed = job.optimizer, job.training.seed
        self.weights, self.indices = weights, indices
        self.held = [index for index in indices if weights.masters[index].numel() > 0]
        self.places = {index: Places.of(weights.parameters[index]) for index in self.held}
        self.dtype = dtype
        self.counts: dict[int, Tensor] = {}
        self.moments: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor | None = None) -> None:
        numbers = cache(partial(self._numbers, lr))
        together: list[tuple[Operands, Numbers]] = []
        turned: list[tuple[Tensor, Tensor]] = []
        for index, count in zip(self.held, self._next_counts(), strict=True):
            master, parameter = self.weights.masters[index], self.weights.parameters[index]
            assert master.grad is not None
            copy = local(parameter) if self.weights.copied else None
            # A user's own model may have its weights transposed in memory.
            rows = master.contiguous(), None if copy is None else copy.contiguous()
            operands = Operands(master.grad, rows[0], self.moments[index], rows[1])
            for whole, written in zip((master, copy), rows, strict=True):
                if whole is not None and written is not None and whole is not written:
                    turned.append((whole, written))
            if master.is_cuda and self.dtype == torch.float32:
                together.append((operands, numbers(parameter.dim() >= 2, count)))
            else:
                self.move(index, operands, self.places[index], count, lr, scale)
        if together:
            from fivefold.training.updates import together as kernel_of_many

            kernel_of_many.adamw(together, scale)
        for whole, written in turned:
            whole.copy_(written)
        for index in self.held:
            self.counts[index].add_(1)

    def _next_counts(self) -> list[int]:
        """Of each that is held, the number of this update, from 1. They are on the host: nothing waits."""
        for index in self.held:
            self._make(index)
        held = [self.counts[index] for index in self.held]
        return [int(count) + 1 for count in torch.stack(held).tolist()] if held else []

    def move(
        self, index: int, operands: Operands, places: Places, count: int, lr: float, scale: Tensor | None
    ) -> None:
        """The update number `count` of a master, or of the piece of it that lies at `places`."""
        numbers = self._numbers(lr, self.weights.parameters[index].dim() >= 2, count)
        key = stochastic.key_of(self.seed, count, self.weights.names[index])
        if operands.master.is_cuda:
            from fivefold.training.updates import kernels

            kernels.adamw(operands, numbers, scale, places, key)
        else:
            operations.adamw(operands, numbers, scale, places, key)

    def _numbers(self, lr: float, matrix: bool, count: int) -> Numbers:
        return Numbers.of(self.settings, lr, self.settings.weight_decay * matrix, count)

    def states(self, index: int) -> dict[str, Tensor]:
        self._make(index)
        if self.held and index not in self.held:
            # An empty shard is never updated, but a checkpoint may keep its count for all ranks.
            self._make(self.held[0])
            self.counts[index].copy_(self.counts[self.held[0]])
        return {"step": self.counts[index], **dict(zip(MOMENTS, self.moments[index], strict=True))}

    def tensors_of(self, index: int) -> list[Tensor]:
        return [*self.moments[index], self.counts[index]] if index in self.moments else []

    def _make(self, index: int) -> None:
        if index not in self.moments:
            master = self.weights.masters[index]
            zeros = partial(torch.zeros, master.shape, dtype=self.dtype, device=master.device)
            self.moments[index] = zeros(), zeros()
            self.counts[index] = torch.zeros((), dtype=torch.float32)
