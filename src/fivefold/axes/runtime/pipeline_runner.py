"""Runs a rank's stages: our lists of actions on torch's pipeline runtime. Only ranks import this file.

What torch is not left to decide: shapes are given, so no message tells them; micro-batches come as a list,
with all their inputs on every rank; FSDP is out of the runtime's sight. Weights that stay for the step are
gathered at its start (`Pipeline._gather`), others by FSDP's own hooks; a stage's gradients are reduced once,
after its last micro-batch: `_Stage.perform_reduce_grad`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from fivefold.axes import pipeline
from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.stages import actions, rank_of, stages_of
from fivefold.comm import compat
from fivefold.config import Job
from fivefold.ledger.precision import precision_named
from fivefold.ledger.setup import Setup
from fivefold.models.attention import places
from fivefold.models.decoder import Decoder

Inputs = dict[str, Any]
"""The keyword inputs of `Decoder.forward` for one micro-batch."""

_TORCH_KINDS = {
    "forward": "F",
    "backward": "B",
    "backward-input": "I",
    "backward-weight": "W",
    "send-activation": "SEND_F",
    "receive-activation": "RECV_F",
    "send-gradient": "SEND_B",
    "receive-gradient": "RECV_B",
    "reduce": "REDUCE_GRAD",
}


class Pipeline:
    """The stages of this rank, and how micro-batches go through them and their neighbours."""

    def __init__(self, parts: list[Decoder], mesh: Mesh, job: Job):
        setup = Setup.of(job)
        self.parts, self.job, self.device = parts, job, mesh.device
        self.group = cast(dist.ProcessGroup, mesh.group("pp"))
        self.numbers = stages_of(job, mesh.place.pp)
        self.frees = setup.frees_weights
        self.dtype: torch.dtype = getattr(torch, precision_named(job.training.precision).compute)
        if self.frees:
            for part in parts:
                _chain_backward(part)
        self.stages = [self._stage(part, n) for part, n in zip(parts, self.numbers, strict=True)]
        texts = [
            [f"{a.stage}{_TORCH_KINDS[a.kind]}{'' if a.kind == 'reduce' else a.micro_batch}" for a in row]
            for row in actions(job)
        ]
        self.schedule = compat.pipeline_schedule(self.stages, int(setup.micro_batches), self._loss, texts)

    def step(self, inputs: list[Inputs], divisor: Tensor | int, scale: float) -> Tensor:
        """Forward and backward of all micro-batches of one optimizer step.

        inputs   one for each micro-batch, the same on every rank of the pipeline
        divisor  what losses are divided by: the number of tokens in the global batch
        scale    what gradients are multiplied with on top
        returns  this rank's part of the loss, a scalar: zero where the last stage is not
        """
        self._divisor, self._scale, self._total = divisor, scale, self._zero()
        inputs = [_with_positions(keywords) for keywords in inputs]
        for part in self.parts:
            if isinstance(part, FSDPModule):
                part.set_is_last_backward(False)
                part.set_requires_gradient_sync(False)
                part.set_reshard_after_backward(self.frees)
        for stage in self.stages:
            stage.inputs = inputs
        if not self.frees:
            self._gather()
        compat.run_schedule(self.schedule, [(keywords["tokens"],) for keywords in inputs])
        for stage in self.stages:
            stage.inputs = []
        return self._total

    @torch.no_grad()
    def evaluate(self, inputs: list[Inputs]) -> Tensor:
        """The summed loss of any number of micro-batches, forward only: zero where the last stage is not."""
        total = self._zero()
        sent: list[tuple[Any, Tensor]] = []  # tensors are kept until they have arrived
        for keywords in map(_with_positions, inputs):
            here: Tensor = keywords["tokens"]
            for part, number in zip(self.parts, self.numbers, strict=True):
                if number > 0 and (source := rank_of(self.job, number - 1)) != self.group.rank():
                    shape = pipeline.activation_shape(self.job)
                    here = torch.empty(shape, dtype=self.dtype, device=self.device)
                    dist.recv(here, group=self.group, group_src=source)
                here = part(**(keywords | {"tokens": here}))
                if part.head is not None:
                    total += here
                elif (target := rank_of(self.job, number + 1)) != self.group.rank():
                    here = here.contiguous()
                    sent.append((dist.isend(here, group=self.group, group_dst=target), here))
        for work, _ in sent:
            work.wait()
        return total

    def _gather(self) -> None:
        """Gather the weights of all stages, in the order in which they are used.

        Left to FSDP, one stage after the other would begin, as its first micro-batch arrives. A rank that
        waits for its first micro-batch gathers its first stage meanwhile, unit by unit, through a buffer of
        one unit's size. Other weights come beside computations, each unit's into a buffer of its own, where
        they stay until the unit's first forward.

        (FSDP's prefetching knows root and streams only from the first forward on, and leaves buffers of a
        stage's size to the allocator of a stream that has no other use for them. `unshard` needs neither.)
        """
        for part, number in zip(self.parts, self.numbers, strict=True):
            waits = number > 0 and part is self.parts[0]
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.unshard(async_op=not waits)

    def _stage(self, part: Decoder, number: int) -> _Stage:
        with torch.device("meta"):
            stream = torch.empty(pipeline.activation_shape(self.job), dtype=self.dtype, requires_grad=True)
            length = self.job.training.seq_len // self.job.layout.cp
            tokens = torch.empty(stream.shape[0], length, dtype=torch.int64)
        return _Stage(
            _Shell(part),
            number,
            int(Setup.of(self.job).stages),
            self.device,
            input_args=tokens if part.embedding is not None else stream,
            output_args=self._zero().to("meta") if part.head is not None else stream,
            group=self.group,
            # Where backward is not cut, weights take their gradients along with the inputs: torch asks for
            # what to do in the weights' turn, and nothing is left.
            dw_builder=None if Setup.of(self.job).can_split_backward else lambda: lambda: None,
        )

    def _loss(self, output: Tensor, target: None) -> Tensor:
        """Of the last stage's output, the summed loss of a micro-batch; what backward starts from."""
        loss = output / self._divisor
        self._total += loss.detach()
        return loss * self._scale

    def _zero(self) -> Tensor:
        """A loss: float32, or float64 where the model computes in it."""
        return torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)


class _Shell(nn.Module):
    """A part as torch's runtime sees it: one tensor in, one tensor out, and nothing of FSDP."""

    def __init__(self, part: Decoder):
        super().__init__()
        self.part = part
        self.inputs: Inputs = {}

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, dim] or tokens [B, S] -> [B, S, dim], or the summed loss, a scalar."""
        if x.requires_grad:
            # Messages want contiguous tensors, whatever order backward leaves dimensions in.
            x = x.view_as(x)
            x.register_hook(Tensor.contiguous)
        return compat.detachable(self.part(**(self.inputs | {"tokens": x})))


class _Stage(PipelineStage):
    """Torch's stage, with inputs by micro-batch, and with FSDP as we want it."""

    submod: _Shell
    inputs: list[Inputs]

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        self.submod.inputs = self.inputs[fwd_chunk_id]
        return super().forward_one_chunk(fwd_chunk_id, args, {}, save_forward_output)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        if backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "input":
            # Nodes of functions written in Python do not keep the graph alive that they are in.
            graph = [get_gradient_edge(output) for output in bwd_kwargs["stage_output"]]
            gradients, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            for group in groups or []:
                group["graph"] = graph
            # Torch leaves them with what was received as well, where they would stay until the next step.
            for received in bwd_kwargs["input_values"]:
                received.grad = None
            return gradients, groups
        part = self.submod.part
        compat.weight_gradients(part.parameters(), bwd_kwargs["param_groups"])
        # These gradients were set past autograd's hooks.
        if isinstance(part, FSDPModule):
            compat.fold_gradients(part)
        else:
            for parameter in part.parameters():
                if parameter.grad is not None:
                    compat.run_gradient_hooks(parameter)
        return (), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The stage's micro-batches are done: sum its gradients over the data ranks, free its weights."""
        part = self.submod.part
        if isinstance(part, FSDPModule):
            part.set_is_last_backward(True)
            part.set_requires_gradient_sync(True)
            part.set_reshard_after_backward(True)
            compat.fold_gradients(part)
            compat.finish_backward(part)


def _chain_backward(part: Decoder) -> None:
    """Tell FSDP which weights backward wants next.

    Left alone it goes by the order of the forwards, and with several micro-batches under way follows it from
    one into another, gathering weights that no computation waits for.
    """
    tops = (part.embedding, *part.blocks.values(), part.head)
    modules = [module for top in tops if top is not None for module in reversed(list(top.modules()))]
    units = [module for module in modules if isinstance(module, FSDPModule)]
    for before, unit in pairwise(units):
        unit.set_modules_to_backward_prefetch([before])
    units[0].set_modules_to_backward_prefetch([units[0]])  # which it has, so that nothing is gathered


def _with_positions(inputs: Inputs) -> Inputs:
    """Positions follow from tokens, which later stages do not see."""
    if inputs.get("positions") is not None:
        return inputs
    return inputs | {"positions": places(inputs["tokens"], inputs.get("documents"))}
