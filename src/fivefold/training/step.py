"""One optimizer step: forward and backward over the micro-batches, reduce, clip, update.

The loss is a sum over tokens divided by the number of valid tokens in the whole global batch, over all
ranks and micro-batches; so neither accumulation, nor padding, nor the number of ranks changes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fivefold.axes import data as data_axis
from fivefold.axes.layout import Mesh
from fivefold.comm.buckets import BucketedAllReduce, plan_buckets
from fivefold.config import Job
from fivefold.data.batch import Batch
from fivefold.models.decoder import Decoder
from fivefold.training.failures import NonFiniteError
from fivefold.training.loss_scale import LossScale
from fivefold.training.norm import clip, local_norm, may_exceed
from fivefold.training.optimizer import Optimizer
from fivefold.training.weights import Weights


@dataclass(frozen=True)
class StepResult:
    """What one step computed, over all ranks."""

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool = False  # fp16 only: the loss scale was too large, and the weights were left alone


class Step:
    """Runs optimizer steps of one job on one rank."""

    def __init__(self, job: Job, model: Decoder, weights: Weights, optimizer: Optimizer, mesh: Mesh):
        self.job = job
        self.model = model
        self.weights = weights
        self.optimizer = optimizer
        self.mesh = mesh
        self.device = weights.masters[0].device
        assert job.training.micro_batch is not None, "call fivefold.config.resolve first"
        self.micro_batch = job.training.micro_batch
        self.synchronisation = data_axis.Synchronisation(model, job)
        self.scale = LossScale(job.training.loss_scale) if job.training.precision == "fp16" else None
        self.buckets: BucketedAllReduce | None = None
        replicas = mesh.group("dp_replicate")
        if replicas is not None and not weights.sharded:
            sizes = [master.numel() * master.element_size() for master in weights.masters]
            plan = plan_buckets(sizes, data_axis.bucket_limit(job))
            self.buckets = BucketedAllReduce(weights.masters, plan, replicas)
            weights.on_gradient(self.buckets.ready)

    def __call__(self, batches: list[Batch], lr: float, step: int) -> StepResult:
        """Train on this rank's micro-batches of step number `step` (used in error messages)."""
        tokens = self.count_tokens(batches)
        loss = self.backward(batches, tokens)
        gradients = self.weights.collect_gradients()
        if self.scale is not None:
            torch._foreach_mul_(gradients, 1 / self.scale.value)
        total, norm = self.totals(loss, gradients)
        loss_value, norm_value = torch.stack([total.double(), norm.double()]).tolist()  # the only wait
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        if self.scale is not None:
            self.scale.update(finite)
            if not finite and self.scale.usable:
                self.weights.clear_gradients()
                return StepResult(loss_value, norm_value, int(tokens), skipped=True)
        if not finite:
            raise NonFiniteError(self.find_non_finite(step, loss, gradients), step)
        limit = self.job.training.clip
        if limit and may_exceed(norm_value, limit):
            clip(gradients, norm, limit)
        self.optimizer.step(lr)
        self.weights.clear_gradients()
        return StepResult(loss_value, norm_value, int(tokens))

    def count_tokens(self, batches: list[Batch]) -> int | torch.Tensor:
        """Valid targets in the global batch; among several ranks a scalar that nobody waits for yet."""
        count = sum(batch.valid for batch in batches)
        if self.mesh.layout.ranks == 1:
            return max(1, count)
        total = torch.full((), count, dtype=torch.int64, device=self.device)
        dist.all_reduce(total)
        return total.clamp_(min=1)

    def backward(self, batches: list[Batch], tokens: int | torch.Tensor) -> torch.Tensor:
        """Gradients of the whole step into `weights`; returns this rank's part of the loss, a scalar."""
        total = torch.zeros(
            (), dtype=torch.float64 if self.job.training.precision == "fp64" else torch.float32
        )
        total = total.to(self.device)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            self.synchronisation.before_backward(last)
            if last and self.buckets is not None:
                self.buckets.expect()
            batch = batch.to(self.device, non_blocking=True)
            loss = self.model(**batch.inputs) / tokens
            (loss if self.scale is None else loss * self.scale.value).backward()
            total += loss.detach()
        if self.buckets is not None:
            self.buckets.finish()
        return total

    def totals(self, loss: torch.Tensor, gradients: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the gradient norm over all ranks, scalars on the device, in one message."""
        norm = local_norm(gradients)
        if self.mesh.layout.ranks == 1:
            return loss, norm
        # Replicas hold the same gradients after the reduction: each counts once.
        both = torch.stack([loss.double(), norm.double() ** 2 / self.mesh.layout.dp_replicate])
        dist.all_reduce(both)
        return both[0], both[1].sqrt().to(norm.dtype)

    def find_non_finite(self, step: int, loss: torch.Tensor, gradients: list[torch.Tensor]) -> str:
        """Name the first rank and parameter where numbers went wrong."""
        bad = None
        if not torch.isfinite(loss):
            bad = "the loss"
        else:
            for name, gradient in zip(self.weights.names, gradients, strict=True):
                if not torch.isfinite(gradient).all():
                    bad = f"the gradient of {name}"
                    break
        everyone: list[str | None] = [bad]
        if self.mesh.layout.ranks > 1:
            everyone = [None] * self.mesh.layout.ranks
            dist.all_gather_object(everyone, bad)
        where = [f"{what} on rank {rank}" for rank, what in enumerate(everyone) if what]
        # Gradients are summed over the ranks: where one rank's loss is the cause, they are bad on all.
        where = [place for place in where if place.startswith("the loss")] or where
        named = (
            " and ".join(where[:2]) or "the gradient norm (each gradient is finite: their squares overflow)"
        )
        return (
            f"step {step}: {named} is not finite. The weights are those of step {step - 1}. "
            "Try a lower optimizer.lr, more optimizer.warmup, training.clip above 0, or another precision."
        )
