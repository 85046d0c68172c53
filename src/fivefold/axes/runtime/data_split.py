"""Sharding a model's state over the data ranks with FSDP2, and telling it when to reduce."""

import math
from functools import partial
from itertools import pairwise
from typing import cast

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fivefold.axes.layout import EXPERT_SHARDS, SHARDS, name_in
from fivefold.axes.runtime.expert_split import shard_experts
from fivefold.axes.runtime.mesh import Mesh
from fivefold.config import Job
from fivefold.ledger.precision import precision_named
from fivefold.ledger.setup import Setup
from fivefold.models.decoder import Decoder
from fivefold.models.moe import Moe


def split(model: Decoder, mesh: Mesh, job: Job) -> Decoder:
    """Shard the model's state over the mesh, in place. Under zero 0 the model stays whole.

    The model may be on the meta device; its parameters become DTensors, sharded along dimension 0.
    """
    layout = mesh.layout
    if layout.zero == 0:
        return model
    precision = precision_named(job.training.precision)
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute) if precision.mixed else None,
        reduce_dtype=getattr(torch, precision.reduce) if precision.mixed else None,
        cast_forward_inputs=False,  # position tables stay in float32, as on one process
    )
    devices = mesh.along(*replica_axes(job), name_in(layout, SHARDS))
    shard = partial(fully_shard, mesh=devices, mp_policy=policy)
    free = Setup.of(job).frees_weights
    together = job.spec.tied and model.embedding is not None and model.head is not None
    if model.embedding is not None and not together:
        # A lookup's backward needs no weights; a user's own embedding may need them.
        embedding = shard(model.embedding, reshard_after_forward=free)
        embedding.set_unshard_in_backward(not job.spec.looks_up)
    if model.head is not None and not together:
        # Backward starts with the head: freeing it after forward would gather it again at once.
        shard(model.head, reshard_after_forward=False)
    for block in model.blocks.values():
        if layout.ep > 1:
            devices_of_experts = mesh.along(*replica_axes(job), EXPERT_SHARDS)
            shard_experts(
                cast(Moe, block.mlp), devices_of_experts, mp_policy=policy, reshard_after_forward=free
            )
        shard(block, reshard_after_forward=free)
    shard(model, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # other factors need an operation gloo lacks
    if free:
        # Gather the next unit's weights while this one computes. (Backward does so by itself.)
        every = (model.embedding, *model.blocks.values(), model.head)
        units = [cast(FSDPModule, unit) for unit in every if isinstance(unit, FSDPModule)]
        for unit, following in pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
    return model


def replica_axes(job: Job) -> tuple[str, ...]:
    """Over which axes FSDP sums its shards by itself (HSDP). It has no way to do so in fewer bits."""
    return () if Setup.of(job).compresses_replicas else ("dp_replicate",)


def before_micro_batch(model: Decoder, job: Job, last: bool) -> None:
    """Tell the split model when to reduce; `last` before the last micro-batch of an optimizer step."""
    if not job.layout.zero:
        return
    root = cast(FSDPModule, model)
    root.set_requires_gradient_sync(last or bool(Setup.of(job).reduces_every_micro_batch))
    root.set_requires_all_reduce(last)
    if job.layout.zero < 3:
        root.set_reshard_after_backward(last)


def local_slab(parameter: torch.Tensor, shards: bool = True) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of a parameter lies in the whole: (offset, shape) along each dimension.

    shards  as it is kept; or before the data axis shards it, as its gradient is before that is reduced

    A plain tensor is its own whole. The mesh of a DTensor has the data axes first, and they shard what the
    axes behind them have left: so the last axis cuts first. Each cuts as `torch.chunk` does.
    """
    shape, offset = list(parameter.shape), [0] * parameter.dim()
    if not isinstance(parameter, DTensor):
        return tuple(offset), tuple(shape)
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        # Where two axes cut one dimension FSDP notes a private kind of shard; it, too, says which dimension.
        cut = shards or not is_data_axis(parameter, axis)
        if cut and (dim := getattr(placement, "dim", None)) is not None:
            ranks = parameter.device_mesh.size(axis)
            chunk = math.ceil(shape[dim] / ranks)
            start = min(chunk * parameter.device_mesh.get_local_rank(axis), shape[dim])
            offset[dim] += start
            shape[dim] = min(chunk, shape[dim] - start)
    return tuple(offset), tuple(shape)


def is_data_axis(parameter: DTensor, axis: int) -> bool:
    """Whether an axis of a parameter's mesh is one of data ranks."""
    names = parameter.device_mesh.mesh_dim_names
    return names is not None and names[axis] not in ("tp", "ep")
