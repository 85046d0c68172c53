"""Spreading the experts of a model over ep ranks, and telling its layers how to route and balance."""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from fivefold.axes.expert import shard_dimension
from fivefold.axes.runtime.context_split import local_part
from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.runtime.tensor_layers import LocalLayer, partial_sum, share_parameters
from fivefold.comm.collectives import Group, all_to_all, exchanged, summed
from fivefold.config import Job
from fivefold.models.decoder import Decoder
from fivefold.models.grouped import grouped_linear
from fivefold.models.moe import Experts, Moe, permute


def split(model: Decoder, mesh: Mesh, job: Job) -> Decoder:
    """Tell the expert layers how to route and balance; under ep, spread their experts. In place.

    The model must be on the meta device, and the tensor axis must have had its turn.
    """
    if job.spec.experts is None:
        return model
    if mesh.layout.ep > 1:
        share_parameters(model, mesh, spread=True)
    for moe in moes(model):
        _balance(moe, mesh, job)
        if mesh.layout.ep > 1:
            compute_locally(moe.experts, mesh.layout.tp)
            moe.dispatch = ExchangingDispatch(mesh.group("ep"), mesh.layout.ep)
    return model


def moes(model: Decoder) -> list[Moe]:
    """The expert layers of a model that has them, in order."""
    return [cast(Moe, block.mlp) for block in model.blocks.values()]


def _balance(moe: Moe, mesh: Mesh, job: Job) -> None:
    training, layout = job.training, mesh.layout
    moe.routing = training.routing or "learned"
    # Every tp rank adds the term for the same tokens, and gradients are summed over tp.
    moe.balance_weight = (training.balance_weight or 0.0) / (training.global_batch * layout.tp)
    moe.balance_rate = training.balance_rate or 0.0
    if layout.cp > 1:
        group = mesh.group("cp")
        moe.sum_counts = lambda counts: summed(counts, group)  # type: ignore[method-assign]
        moe.places = lambda length, device: local_part(  # type: ignore[method-assign]
            torch.arange(training.seq_len, device=device), mesh.place, job
        )


def compute_locally(experts: Experts, tp: int) -> None:
    """Let `experts`, whose parameters are DTensors, compute with this rank's parts: partial sums under tp."""
    for name, ranks in (("gate", 1), ("up", 1), ("down", tp)):
        if (stacked := getattr(experts, name)) is not None:
            experts.set_submodule(
                name, LocalLayer(stacked, partial(partial_sum, ranks), linear=grouped_linear)
            )


class ExchangingDispatch(nn.Module):
    """Takes rows to the ranks that hold their experts, and what the experts made of them back."""

    def __init__(self, group: Group, ranks: int):
        super().__init__()
        self.group, self.ranks = group, ranks

    def forward(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """experts  maps (rows, counts) of this rank's experts to rows
        rows     [N, dim], sorted by expert, of all experts
        counts   [E] int64
        returns  [N, dim], in the same order
        """
        leaving = counts.view(self.ranks, -1)  # [ranks, E / ranks]
        ones = [1] * self.ranks
        coming = exchanged(leaving, self.group, ones, ones)
        # The one moment at which the host must wait: it has to know how much to receive from whom.
        sent, received = torch.stack([leaving.sum(1), coming.sum(1)]).tolist()

        rows = all_to_all(rows, self.group, received, sent)
        # They come sorted by rank, and by expert for each rank.
        experts_here = torch.arange(coming.shape[1], device=rows.device).repeat(self.ranks)
        expert = experts_here.repeat_interleave(coming.flatten(), output_size=len(rows))
        order = expert.argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=rows.device))
        rows = experts(permute(rows, order, place), coming.sum(0))
        return all_to_all(permute(rows, place, order), self.group, sent, received)


def shard_experts(moe: Moe, devices: DeviceMesh, **settings: Any) -> None:
    """Make the experts of one layer an FSDP unit over `devices`, which hold the same ones. Only under ep.

    (Where no other rank holds them, FSDP over a group of one sends nothing, but still keeps master weights.)
    """

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dimension(cast(DTensor, parameter).to_local().shape, devices.size(-1)))

    fully_shard(moe.experts, mesh=devices, shard_placement_fn=placement, **settings)
