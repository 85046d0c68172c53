"""One optimizer step: forward and backward over the micro-batches, reduce, clip, update.

The loss is a sum over tokens divided by the number of valid tokens in the whole global batch, over all
ranks and micro-batches; so neither accumulation, nor padding, nor the number of ranks changes it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fivefold.axes import data as data_axis
from fivefold.axes.pieces import copies, pieces
from fivefold.axes.runtime.compressed_reduction import ReduceScatter, ReplicaSum, compress
from fivefold.axes.runtime.context_split import local_inputs
from fivefold.axes.runtime.data_split import before_micro_batch
from fivefold.axes.runtime.fp8_split import first_non_finite
from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.runtime.pipeline_runner import Pipeline
from fivefold.comm.buckets import BucketedAllReduce
from fivefold.comm.compat import scale_each
from fivefold.config import Job
from fivefold.data.batch import Batch
from fivefold.models.decoder import Decoder
from fivefold.training.balance import Balance
from fivefold.training.failures import NonFiniteError
from fivefold.training.late_sums import LateSums
from fivefold.training.loss_scale import LossScale
from fivefold.training.norm import clipping, local_norm, may_exceed, shared_square, wide
from fivefold.training.optimizer import Optimizer
from fivefold.training.residuals import Residuals
from fivefold.training.weights import Weights


@dataclass(frozen=True)
class OuterResult:
    """What replicas told each other in an outer step.

    replicas_loss    the mean of their losses since the one before
    outer_wait_s     seconds that this replica waited for it
    replica_lag_s    in the one before, seconds from the first replica's part to the last's
    slowest_replica  whose came last
    """

    replicas_loss: float
    outer_wait_s: float
    replica_lag_s: float
    slowest_replica: int


@dataclass(frozen=True)
class StepResult:
    """What one step computed, over all ranks; where replicas train alone, over those of this rank's."""

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool = False  # the weights were left alone
    problem: str | None = None  # what was not finite, unless fp16's loss scale is to blame for it
    imbalance: float | None = None  # experts only: tokens of the busiest over the mean, worst layer
    asked: float = 0.0  # what ranks asked all of them for, added up: see `Step.asks`
    samples: int = 0  # digests of ranks' samples, added up: see `Step.samples`
    outer: OuterResult | None = None  # where an outer step followed


class Step:
    """Runs optimizer steps of one job on one rank."""

    def __init__(self, job: Job, parts: list[Decoder], weights: Weights, optimizer: Optimizer, mesh: Mesh):
        self.job = job
        self.parts = parts
        self.weights = weights
        self.optimizer = optimizer
        self.mesh = mesh
        self.device = weights.device
        assert job.training.micro_batch is not None, "call fivefold.config.resolve first"
        self.micro_batch = job.training.micro_batch
        self.asks = 0.0  # what this rank asks all of them for, as a number: every rank learns the sum
        self.samples = 0  # a digest of the samples that this rank took: every rank learns the sum
        self.clipping: torch.Tensor | None = None  # what the optimizer multiplies gradients by, in this step
        self.tell: Callable[[str, int], None] = lambda phase, part: None  # which phase begins
        self.scale = LossScale(job.training.loss_scale) if job.training.precision == "fp16" else None
        self.pieces = pieces(job, mesh.place)
        shares = [1 / copies(piece, mesh.layout) for piece in self.pieces]
        self.shares = torch.tensor(shares, dtype=torch.float64).to(self.device)
        self.late = LateSums(self.pieces, mesh)
        self.experts = Balance(job, parts, mesh)
        self.pipeline = Pipeline(parts, mesh, job) if mesh.layout.pp > 1 else None
        self.buckets: list[BucketedAllReduce] = []
        reductions: list[ReduceScatter | ReplicaSum] = []
        if weights.sharded:
            reductions = compress(parts, mesh, job)
        else:
            rounds = job.communication.compress
            feedback = rounds != "none" and job.communication.error_feedback
            for axes, buckets in data_axis.replicated_buckets(job, self.pieces):
                group = mesh.group(axes)
                assert group is not None
                self.buckets.append(BucketedAllReduce(weights.holders, buckets, group, rounds, feedback))
                weights.on_gradient(self.buckets[-1].ready)
        self.replica_sums = [each for each in reductions if isinstance(each, ReplicaSum)]
        self.residuals = Residuals(weights, self.pieces, mesh.place, mesh.layout, self.buckets, reductions)

    def __call__(self, batches: list[Batch], lr: float, step: int) -> StepResult:
        """Train on this rank's micro-batches of step number `step` (used in error messages)."""
        self.tell("forward and backward", 0)
        tokens = self.count_tokens(batches)
        loss = self.backward(batches, tokens)
        gradients = self.collect()
        if self.scale is not None:
            scale_each(gradients, 1 / self.scale.value)
        self.tell("loss and norm", 0)
        total, norm = self.totals(loss, gradients)
        figures = torch.cat([torch.stack([total.double(), norm.double()]), self._told])
        loss_value, norm_value, asked, samples = figures.tolist()  # the only wait
        told: dict[str, Any] = {"asked": asked, "samples": int(samples)}
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        if self.scale is not None:
            before = self.scale.value
            self.scale.update(finite)
            self.residuals.scale(self.scale.value / before)
        if not finite:
            self.residuals.forget()
            overflown = self.scale is not None and self.scale.usable
            problem = None if overflown else self.find_non_finite(step, loss, gradients)
            self.weights.clear_gradients()
            self.experts.forget()
            if problem is not None and self.job.resilience.non_finite != "skip":
                raise NonFiniteError(problem, step)
            return StepResult(loss_value, norm_value, int(tokens), True, problem, **told)
        limit = self.job.training.clip
        self.clipping = clipping(norm, limit) if limit and may_exceed(norm_value, limit) else None
        self.tell("optimizer", 0)
        self.optimizer.step(lr, self.clipping)
        self.weights.clear_gradients()
        imbalance = self.experts.update()
        return StepResult(loss_value, norm_value, int(tokens), imbalance=imbalance, **told)

    def before_all_meet(self, step: int) -> None:
        """Called before something that all ranks do together after this step."""

    def count_tokens(self, batches: list[Batch]) -> int | torch.Tensor:
        """Valid targets in the global batch; with several ranks a scalar that is still being summed."""
        count = sum(batch.valid for batch in batches)
        if self.mesh.layout.ranks == 1:
            return max(1, count)
        mine = count if self.mesh.place.speaks_for_sequences else 0
        total = torch.full((), mine, dtype=torch.int64, device=self.device)
        dist.all_reduce(total, group=self.mesh.everyone)
        return total.clamp_(min=1)

    def backward(self, batches: list[Batch], tokens: int | torch.Tensor) -> torch.Tensor:
        """Gradients of the whole step into `weights`; returns this rank's part of the loss, a scalar."""
        for buckets in self.buckets:
            buckets.expect(len(batches))
        scale = 1.0 if self.scale is None else self.scale.value
        self.experts.begin(scale)
        if self.pipeline is not None:
            total = self.pipeline.step([self.inputs(batch) for batch in batches], tokens, scale)
        else:
            total = self._backward_one_by_one(batches, tokens, scale)
        self.tell("gradient reduction", 0)
        if self.buckets:
            self.weights.fetch_gradients()
        for buckets in self.buckets:
            buckets.finish()
        return total

    def _backward_one_by_one(
        self, batches: list[Batch], tokens: int | torch.Tensor, scale: float
    ) -> torch.Tensor:
        total = torch.zeros(
            (), dtype=torch.float64 if self.job.training.precision == "fp64" else torch.float32
        )
        total = total.to(self.device)
        for number, batch in enumerate(batches):
            self.tell("forward and backward", number + 1)
            last = number == len(batches) - 1
            before_micro_batch(self.parts[0], self.job, last)
            for replica_sum in self.replica_sums:
                replica_sum.last = last
            loss = self.parts[0](**self.inputs(batch)) / tokens
            (loss if scale == 1 else loss * scale).backward()
            total += loss.detach()
        return total

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """What the model takes of a batch on this rank, on its device."""
        local = local_inputs(batch.inputs, self.mesh.place, self.job)
        return {
            name: None if tensor is None else tensor.to(self.device, non_blocking=True)
            for name, tensor in local.items()
        }

    def collect(self) -> list[torch.Tensor]:
        """This rank's gradients after backward, with every sum over ranks done."""
        gradients = self.weights.collect_gradients()
        self.late(gradients)
        return gradients

    def totals(self, loss: torch.Tensor, gradients: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the gradient norm over all ranks, scalars on the device, in one message.

        And the sums of what ranks ask for and of their samples: all of them then know it after the same step.
        """
        told = (self.asks, float(self.samples))
        self._told = torch.cat(
            [torch.full((1,), each, dtype=torch.float64, device=self.device) for each in told]
        )
        if self.mesh.layout.ranks == 1:
            return loss, local_norm(gradients)
        # The ranks of a tp group have the same loss: the first tells it.
        mine = loss.double() * int(self.mesh.place.tp == 0)
        every = torch.cat([torch.stack([mine, shared_square(gradients, self.shares)]), self._told])
        dist.all_reduce(every, group=self.mesh.everyone)
        self._told = every[2:]
        return every[0], every[1].sqrt().to(wide(gradients[0].dtype))

    def find_non_finite(self, step: int, loss: torch.Tensor, gradients: list[torch.Tensor]) -> str:
        """Name the first rank and parameter where numbers went wrong, in a sentence."""
        bad = None
        if not torch.isfinite(loss):
            bad = "the loss"
        else:
            for name, gradient in zip(self.weights.names, gradients, strict=True):
                if not torch.isfinite(gradient).all():
                    bad = f"the gradient of {name}"
                    break
        first = first_non_finite(self.parts, dict(zip(self.weights.names, gradients, strict=True)))
        came = f" (first seen in {first})" if bad and first else ""
        mine = bad and f"{bad} on rank {dist.get_rank() if dist.is_initialized() else 0}{came}"
        everyone: list[str | None] = [mine]
        if self.mesh.layout.ranks > 1:
            everyone = [None] * self.mesh.layout.ranks
            dist.all_gather_object(everyone, mine, group=self.mesh.everyone)
        where = [place for place in everyone if place]
        # Gradients are summed over the ranks: where one rank's loss is the cause, they are bad on all.
        where = [place for place in where if place.startswith("the loss")] or where
        named = (
            " and ".join(where[:2]) or "the gradient norm (each gradient is finite: their squares overflow)"
        )
        return f"step {step}: {named} is not finite."
