"""Bugs to plant in layouts of more than one process, and a way to plant many in one start of ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import fivefold.training.step
from fivefold.axes import data as data_axis
from fivefold.axes.layout import Layout
from fivefold.axes.pieces import Piece
from fivefold.axes.pieces import copies as real_copies
from fivefold.axes.runtime import tensor_layers
from fivefold.axes.runtime.context_split import local_inputs
from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.runtime.pipeline_runner import Pipeline
from fivefold.axes.runtime.tensor_layers import Stream
from fivefold.comm.buckets import BucketedAllReduce
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.models.moe import Experts
from fivefold.training.balance import Balance
from fivefold.training.late_sums import LateSums
from fivefold.training.norm import clipping, local_norm
from fivefold.training.optimizer import Optimizer
from fivefold.training.ranks import run_ranks
from fivefold.training.step import Step
from fivefold.training.weights import Weights
from fivefold.verification import Verdict, proof, verify
from fivefold.verification.compute import Computed, compute
from tests.cases import Case

Plant = Callable[[pytest.MonkeyPatch], None]


# --- the batch ---------------------------------------------------------------------------------------------


def every_rank_gets_the_same_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mesh, "data_rank", property(lambda mesh: 0))


def replicas_get_the_same_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mesh, "data_rank", property(lambda mesh: mesh.place.dp_shard))


def rows_change_places_under_tp(patch: pytest.MonkeyPatch) -> None:
    real = Stream.leave
    patch.setattr(Stream, "leave", lambda stream, x: real(stream, x).flip(0))


def every_row_has_the_first_ones_documents_under_cp(patch: pytest.MonkeyPatch) -> None:
    def inputs(given: Any, place: Any, job: Job) -> Any:
        if job.layout.cp > 1:
            given = given | {"documents": given["documents"][:1].expand_as(given["documents"])}
        return local_inputs(given, place, job)

    patch.setattr(fivefold.training.step, "local_inputs", inputs)


# --- sums over ranks ---------------------------------------------------------------------------------------


def gradients_are_averaged_over_shards(patch: pytest.MonkeyPatch) -> None:
    real = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda module, factor: real(module, 2.0))


def replicas_are_not_reduced(patch: pytest.MonkeyPatch) -> None:
    """Only FSDP waits for an all-reduce in a group that is not all ranks."""
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if options.get("group") is not None and not options.get("async_op"):
            return None
        return real(tensor, *args, **options)

    patch.setattr(dist, "all_reduce", all_reduce)


def replicas_never_come_together(patch: pytest.MonkeyPatch) -> None:
    real = FSDPModule.set_requires_all_reduce
    patch.setattr(FSDPModule, "set_requires_all_reduce", lambda module, needed: real(module, False))


def one_bucket_is_not_reduced(patch: pytest.MonkeyPatch) -> None:
    real = BucketedAllReduce.finish

    def finish(self: BucketedAllReduce) -> None:
        _, flight = self._flights[-1]
        flight.result().div_(2)
        real(self)

    patch.setattr(BucketedAllReduce, "finish", finish)


def gradients_are_not_summed_over_cp(patch: pytest.MonkeyPatch) -> None:
    real = data_axis.replicated_buckets

    def buckets(job: Job, mine: Any) -> Any:
        return [] if job.layout.cp > 1 else real(job, mine)

    patch.setattr(data_axis, "replicated_buckets", buckets)


def losses_are_not_divided_by_micro_batches(patch: pytest.MonkeyPatch) -> None:
    real = Pipeline.step

    def step(self: Pipeline, inputs: Any, divisor: Any, scale: float) -> torch.Tensor:
        return real(self, inputs, divisor / len(inputs), scale)

    patch.setattr(Pipeline, "step", step)


def tied_weights_are_untied(patch: pytest.MonkeyPatch) -> None:
    """The stages' copies of the embedding never hear of each other's gradients."""
    real = LateSums.__init__

    def init(self: LateSums, mine: Any, mesh: Mesh) -> None:
        real(self, mine, mesh)
        self.shared = []

    patch.setattr(LateSums, "__init__", init)


def a_bias_is_added_by_every_tp_rank(patch: pytest.MonkeyPatch) -> None:
    def row(stream: Stream, linear: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return stream.leave(linear(x, weight, bias))

    patch.setattr(tensor_layers, "row", row)


def experts_are_averaged_over_ep(patch: pytest.MonkeyPatch) -> None:
    real = FSDPModule.set_gradient_divide_factor

    def set_factor(module: Any, factor: float) -> None:
        real(module, 2.0 if isinstance(module, Experts) else factor)

    patch.setattr(FSDPModule, "set_gradient_divide_factor", set_factor)


def gradients_in_16_bits_count_twice(patch: pytest.MonkeyPatch) -> None:
    """A copy in float32 is only there where the model computes in 16 bits."""
    real = Weights._into_master

    def into_master(self: Weights, index: int) -> None:
        if self.copied:
            self.parameters[index].grad.mul_(2)  # type: ignore[union-attr]
        real(self, index)

    patch.setattr(Weights, "_into_master", into_master)


# --- behind the gradients ----------------------------------------------------------------------------------


def the_norm_forgets_other_ranks(patch: pytest.MonkeyPatch) -> None:
    real = Step.totals

    def totals(self: Step, loss: torch.Tensor, gradients: list[torch.Tensor]) -> Any:
        return real(self, loss, gradients)[0], local_norm(gradients)

    patch.setattr(Step, "totals", totals)


def the_norm_counts_copies_twice(patch: pytest.MonkeyPatch) -> None:
    def copies(piece: Piece, layout: Layout) -> int:
        return real_copies(piece, layout) // (layout.tp if piece.partial else 1)

    patch.setattr(fivefold.training.step, "copies", copies)


def each_stage_clips_by_its_own_norm(patch: pytest.MonkeyPatch) -> None:
    real = Step.totals

    def totals(self: Step, loss: torch.Tensor, gradients: list[torch.Tensor]) -> Any:
        mine = local_norm(gradients)
        patch.setattr(fivefold.training.step, "clipping", lambda _, limit: clipping(mine, limit))
        return real(self, loss, gradients)

    patch.setattr(Step, "totals", totals)


def adam_forgets_how_many_steps_it_took(patch: pytest.MonkeyPatch) -> None:
    real = Optimizer.step

    def step(self: Optimizer, lr: float, scale: torch.Tensor | None = None) -> None:
        for index in self.update_of:
            self.update_of[index].states(index)["step"].zero_()
        real(self, lr, scale)

    patch.setattr(Optimizer, "step", step)


def balance_forgets_tokens_of_other_cp_ranks(patch: pytest.MonkeyPatch) -> None:
    real = Balance.update

    def update(self: Balance) -> float | None:
        if self.mesh.place.cp > 0:
            self.forget()
        return real(self)

    patch.setattr(Balance, "update", update)


def heldout_losses_are_averaged_over_ranks(patch: pytest.MonkeyPatch) -> None:
    def all_reduce(figures: torch.Tensor) -> None:
        figures[0] /= figures[1].clamp(min=1)
        figures[1].clamp_(max=1)
        dist.all_reduce(figures)

    patch.setattr("fivefold.training.validation.dist", SimpleNamespace(all_reduce=all_reduce))


# --- planting ----------------------------------------------------------------------------------------------


def compute_with_each(world: World, plants: list[Plant], *jobs: Job) -> list[list[Computed]]:
    """As `compute`, once with each bug; a process alone has none of them."""
    found = []
    for plant in plants:
        with pytest.MonkeyPatch.context() as patch:
            if world.size > 1:
                plant(patch)
            found.append(compute(world, *jobs))
    return found


def verdicts_on(
    case: Case, plants: list[Plant], monkeypatch: pytest.MonkeyPatch, precision: Any = "fp64"
) -> dict[str, Verdict]:
    """What `verify` says of each bug, by its name: ranks of one layout are started once for all of them."""
    ran: dict[str, list[list[Computed]]] = {}
    verdicts = {}

    for number, plant in enumerate(plants):

        def run(
            _: Any, ranks: int, *jobs: Job, device: Any = "cpu", number: int = number
        ) -> list[list[Computed]]:
            key = " ".join(job.model_dump_json() for job in jobs)
            if key not in ran:
                ran[key] = run_ranks(compute_with_each, ranks, plants, *jobs)[0]
            return [ran[key][number]]

        monkeypatch.setattr(proof, "run_ranks", run)
        verdicts[plant.__name__] = verify(case.job(), case.ranks, precision=precision)
    return verdicts
