"""Spreading the experts of a model over ep ranks, and telling its layers how to route and balance."""

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from fivefold.axes.expert import shard_dimension
from fivefold.axes.layout import EXPERT_SHARDS
from fivefold.axes.runtime.context_split import local_part
from fivefold.axes.runtime.expert_layers import ExchangingDispatch, compute_locally, share_parameters
from fivefold.axes.runtime.mesh import Mesh
from fivefold.comm.collectives import summed
from fivefold.config import Job
from fivefold.models.decoder import Decoder
from fivefold.models.moe import Moe


def split(model: Decoder, mesh: Mesh, job: Job) -> Decoder:
    """Tell the expert layers how to route and balance; under ep, spread their experts. In place.

    The model must be on the meta device, and the tensor axis must have had its turn.
    """
    if job.spec.experts is None:
        return model
    for moe in moes(model):
        _balance(moe, mesh, job)
        if mesh.layout.ep > 1:
            share_parameters(moe.experts, job.spec, mesh)
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


def shard_experts(moe: Moe, mesh: Mesh, **settings: Any) -> None:
    """Make the experts of one layer an FSDP unit over the ranks that hold the same ones. Only under ep.

    (Where no other rank holds them, FSDP over a group of one sends nothing, but still keeps master weights.)
    """
    devices = mesh.along("dp_replicate", EXPERT_SHARDS)

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dimension(cast(DTensor, parameter).to_local().shape, devices.size(-1)))

    fully_shard(moe.experts, mesh=devices, shard_placement_fn=placement, **settings)
