"""How evenly experts are used, over all ranks and micro-batches of a step; and their balancing bias."""

from typing import cast

import torch
import torch.distributed as dist

from fivefold.axes.runtime.mesh import Mesh
from fivefold.config import Job
from fivefold.models.decoder import Decoder
from fivefold.models.moe import Moe


class Balance:
    """Looks after the expert layers of this rank; without any, every method does nothing."""

    def __init__(self, job: Job, parts: list[Decoder], mesh: Mesh):
        self.job = job
        self.mesh = mesh
        self.layers: dict[int, Moe] = {}
        if job.spec.experts is not None:
            for part in parts:
                self.layers |= {int(number): cast(Moe, block.mlp) for number, block in part.blocks.items()}

    def begin(self, loss_scale: float) -> None:
        """A step begins, whose loss is multiplied by `loss_scale` before backward."""
        self.forget()
        for moe in self.layers.values():
            moe.loss_scale = loss_scale

    def forget(self) -> None:
        for moe in self.layers.values():
            moe.routed.zero_()

    @torch.no_grad()
    def update(self) -> float | None:
        """After a step: move the biases; returns the busiest expert's tokens over the mean, worst layer."""
        if not self.layers:
            return None
        spec = self.job.spec
        device = next(iter(self.layers.values())).routed.device
        counts = torch.zeros(spec.layers, spec.experts or 0, dtype=torch.int64, device=device)
        if self.mesh.place.tp == 0:  # the ranks of a tp group route the same tokens
            for number, moe in self.layers.items():
                counts[number] = moe.routed
        if self.mesh.layout.ranks > 1:
            dist.all_reduce(counts, group=self.mesh.everyone)
        if self.job.training.balance == "bias":
            for number, moe in self.layers.items():
                moe.update_bias(counts[number])
        busiest: float = (counts.amax(1) / counts.double().mean(1)).max().item()
        return busiest
