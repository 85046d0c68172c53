"""From a job to the objects that train it on this rank: model, weights, optimizer, step."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fivefold.axes.layout import Layout
from fivefold.axes.outer import replica_of
from fivefold.axes.pieces import narrow_gradients, pieces, size_of
from fivefold.axes.runtime import (
    context_split,
    data_split,
    expert_split,
    fp8_split,
    pipeline_split,
    tensor_split,
)
from fivefold.axes.runtime.fp8_split import WeightScales
from fivefold.axes.runtime.mesh import Mesh
from fivefold.config import Job
from fivefold.interchange.read import TheirWeights
from fivefold.ledger.precision import precision_named
from fivefold.ledger.setup import Setup
from fivefold.models.decoder import Decoder
from fivefold.models.initial import initial_values
from fivefold.models.own.decoder import OwnDecoder, first_values
from fivefold.models.own.spec import OwnSpec
from fivefold.training.local_steps import LocalStep
from fivefold.training.optimizer import Optimizer
from fivefold.training.outer_step import OuterStep
from fivefold.training.recompute import apply_recompute
from fivefold.training.step import Step
from fivefold.training.weights import Weights, local, named_parameters


@dataclass
class Built:
    """Everything a rank needs to take optimizer steps.

    parts  the stages of the model that this rank computes, in forward order; without a pipeline the model
    """

    job: Job
    parts: list[Decoder]
    mesh: Mesh
    weights: Weights
    optimizer: Optimizer
    step: Step

    @property
    def outer(self) -> OuterStep | None:
        """What outer steps keep, where replicas take any."""
        return self.step.outer if isinstance(self.step, LocalStep) else None

    @property
    def shares(self) -> int:
        """How many shares of the batch are trained on apart: one for each replica that trains alone."""
        return 1 if self.outer is None else self.mesh.layout.dp_replicate

    @property
    def model(self) -> Decoder:
        """The model, or the first stage of it that is here."""
        return self.parts[0]


def build(
    job: Job,
    device: torch.device,
    mesh: Mesh | None = None,
    memory: AbstractContextManager[Any] | None = None,
) -> Built:
    """Build a resolved job on `device`. The process group must be up when the layout has several ranks.

    mesh    the layout's, where one has been made already: each makes process groups of its own
    memory  in which context weights and states get their memory: under torch's FakeTensorMode they take
            none, and steps may be tried that no machine here could compute

    The model is made without memory, split, and only then filled: no rank ever holds more than its part.
    """
    spec, precision = job.spec, precision_named(job.training.precision)
    mesh = mesh or Mesh(Layout.of(job), device)
    alone = job.communication.takes_outer_steps
    # Between outer steps a replica is a run of its own.
    own, within = (replica_of(job), mesh.replica) if alone else (job, mesh)
    with torch.device("meta"):
        model = OwnDecoder(spec) if isinstance(spec, OwnSpec) else Decoder(spec)
        model = model.to(getattr(torch, precision.master))
    if model.head is not None and job.training.loss_chunk:
        model.head.loss_chunk = job.training.loss_chunk
    parts = pipeline_split.split(model, within, own)
    for part in parts:
        for axis in (tensor_split, expert_split, context_split, fp8_split):
            axis.split(part, within, own)
        apply_recompute(part, job.training.recompute)
        if job.training.compile:
            compile_parts(part, chunked=job.training.loss_chunk > 0)
        data_split.split(part, within, own)
    with memory or nullcontext():
        for part in parts:
            part.to_empty(device=device)
        fp8_split.forget(parts)
        fill(parts, job)
        setup, mine = Setup.of(own), pieces(own, within.place)
        narrow = [
            i for i, piece in enumerate(mine) if narrow_gradients(setup, size_of([piece], within.layout))
        ]
        sharded, offload = mesh.layout.zero > 0, job.optimizer.offload
        weights = Weights(parts, precision, sharded=sharded, tied=spec.tied, narrow=narrow, offload=offload)
        if own.training.fp8 == "tensorwise":
            weights.scales = WeightScales(own, within, parts, weights.names, weights.on_device())
            weights.scales.find()
        optimizer = Optimizer(own, weights, within)
        step = (LocalStep if alone else Step)(job, parts, weights, optimizer, mesh)
    return Built(job, parts, mesh, weights, optimizer, step)


def compile_parts(model: Decoder, chunked: bool = False) -> None:
    """Compile each block and the head on its own, so that equal blocks share one compilation.

    chunked  The head makes its loss in chunks. Of it the norm is compiled, and what lies between the products
             of a chunk: the whole loop would be as many copies of that in one graph. The last chunk, if it is
             shorter, has a graph of its own: one for any length would then serve them all, and be slower.
    """
    modules: list[nn.Module] = list(model.blocks.values())
    head = model.head
    if head is not None and chunked:
        modules.append(head.norm)
        head.of_chunk = torch.compile(head.of_chunk, dynamic=False)  # type: ignore[method-assign]
    elif head is not None:
        modules.append(head)
    for module in modules:
        module.forward = torch.compile(module.forward)  # type: ignore[method-assign]


@torch.no_grad()
def fill(parts: list[Decoder], job: Job) -> None:
    """Give every parameter its initial values; each rank makes only its own slab of them."""
    if isinstance(job.spec, OwnSpec):
        return fill_own(parts, job, job.spec)
    if job.model.weights is not None:
        return fill_from(parts, job, TheirWeights(Path(job.model.weights), job.spec))
    for name, parameter in named_parameters(parts, job.spec.tied):
        offset, shape = data_split.local_slab(parameter)
        target = local(parameter)
        target.copy_(
            initial_values(
                job.spec,
                name,
                tuple(parameter.shape),
                job.training.seed,
                offset=offset,
                local_shape=shape,
                device=target.device,
                dtype=target.dtype,
            )
        )


@torch.no_grad()
def fill_from(parts: list[Decoder], job: Job, weights: TheirWeights) -> None:
    """Give every parameter the values of a Hugging Face folder; each rank reads only its own slab of them."""
    for name, parameter in named_parameters(parts, job.spec.tied):
        weights.fill(name, local(parameter), data_split.local_slab(parameter)[0])


@torch.no_grad()
def fill_own(parts: list[Decoder], job: Job, spec: OwnSpec) -> None:
    """Give the parts of a user's own model their values: each rank makes all of them and keeps its slab.

    Buffers compute with the weights, so they have their dtype, whoever keeps the master weights.
    """
    # FSDP warns of parts that return views: they must not be changed in place. The contract has seen to that.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    whole = first_values(spec, job.training.seed)
    for name, parameter in named_parameters(parts, tied=False):
        offset, shape = data_split.local_slab(parameter)
        slab = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        local(parameter).copy_(whole[name][slab])
    compute = getattr(torch, precision_named(job.training.precision).compute)
    for part in parts:
        for path, module in part.named_modules(remove_duplicate=False):
            for key, buffer in module.named_buffers(recurse=False):
                value = whole[f"{path}.{key}"]
                dtype = compute if value.is_floating_point() else value.dtype
                setattr(module, key, value.to(buffer.device, dtype))
