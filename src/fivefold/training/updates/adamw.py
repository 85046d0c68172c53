"""AdamW in one pass: gradient, master weight and moments are read once, and written once.

On a GPU by a kernel (`kernels.py`), which needs Triton; elsewhere by torch's operations (`operations.py`).
"""

from collections.abc import Sequence
from functools import partial

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
        for index in self.held:
            master, name = self.weights.masters[index], self.weights.names[index]
            assert master.grad is not None
            self._make(index)
            count = int(self.counts[index].add_(1).item())  # on the host: nothing waits
            matrix = self.weights.parameters[index].dim() >= 2
            numbers = Numbers.of(self.settings, lr, self.settings.weight_decay * matrix, count)
            copy = local(self.weights.parameters[index]) if self.weights.copied else None
            key = stochastic.key_of(self.seed, count, name)
            # A user's own model may have its weights transposed in memory.
            rows = master.contiguous(), None if copy is None else copy.contiguous()
            operands = Operands(master.grad, rows[0], self.moments[index], rows[1])
            if master.is_cuda:
                from fivefold.training.updates import kernels

                kernels.adamw(operands, numbers, scale, self.places[index], key)
            else:
                operations.adamw(operands, numbers, scale, self.places[index], key)
            for whole, written in zip((master, copy), rows, strict=True):
                if whole is not None and written is not None and whole is not written:
                    whole.copy_(written)

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
