"""The weights that the optimizer updates, and how gradients reach them.

The model computes with weights of the compute dtype; the optimizer updates master weights, which are plain
tensors: this rank's part of each. Depending on how the model was split the two are

    the same tensors        zero 0, in fp32 or fp64
    a copy of each other    zero 0, in bf16 or fp16: masters are a float32 copy, perhaps in host memory
    shards and gathers      zero 1 to 3: masters are FSDP's shards, compute weights what it gathers

and the training step sees only `masters`, the `.grad` of their `holders`, and a few verbs.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fivefold.axes.runtime.data_split import local_slab
from fivefold.axes.runtime.fp8_split import WeightScales
from fivefold.comm.compat import copy_each, distributed_as
from fivefold.ledger.precision import Precision
from fivefold.models.inventory import EMBEDDING
from fivefold.training.host_tensors import on_host

TIED_OUTPUT = "head.output.weight"
"""What a stage without the embedding calls its own copy of it, when the two are tied."""


class Weights:
    """This rank's master weights, by parameter name.

    names       parameter names, in the model's order; a tied embedding that two stages of this rank use is
                there twice
    parameters  the model's own parameters (DTensors when split or sharded)
    masters     what the optimizer updates: plain local tensors, one per parameter
    holders     what has a master's gradient as its `.grad`: the master itself; or, for one in host memory, a
                stand-in on the device that takes no memory
    sharded     whether FSDP keeps the masters and reduces their gradients
    narrow      whose gradients stay in 16 bits, as backward makes them (`axes/pieces.py` says where they do)
    scales      of weights that are multiplied in 8 bits, where there are any
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        precision: Precision,
        *,
        sharded: bool,
        tied: bool,
        narrow: Collection[int] = (),
        offload: bool = False,
    ):
        """`offload`: what the model does not compute with lies in host memory."""
        named = named_parameters(parts, tied)
        self.names = [name for name, _ in named]
        self.sharded, self.offload, self.narrow = sharded, offload, frozenset(narrow)
        self.scales: WeightScales | None = None
        split = any(isinstance(parameter, DTensor) for _, parameter in named)
        self.copied = precision.mixed and not sharded
        self.moved = self.copied or (split and not sharded)
        self._listeners: list[Callable[[int], None]] = []
        self.masters: list[torch.Tensor]
        if self.copied:
            values = (local(parameter.detach()) for _, parameter in named)
            self.masters = [on_host(v, v.device) if offload else v.clone() for v in values]
            for part in parts:
                part.to(getattr(torch, precision.compute))
        elif split:
            self.masters = [local(parameter.detach()) for _, parameter in named]
        else:
            self.masters = [parameter for _, parameter in named]
        self.parameters: list[torch.Tensor] = [parameter for _, parameter in named_parameters(parts, tied)]
        self.holders = self.masters
        if self.masters_on_host:
            self.holders = [
                stand_in(master, local(parameter).device)
                for master, parameter in zip(self.masters, self.parameters, strict=True)
            ]
        for index in self.narrow:
            self.holders[index].grad_dtype = None  # any
        if self.moved:
            for index, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))

    @property
    def masters_on_host(self) -> bool:
        """Whether they lie in host memory: where they are a copy, and are offloaded."""
        return self.copied and self.offload

    @property
    def device(self) -> torch.device:
        """What the model computes on."""
        return self.holders[0].device

    def on_device(self) -> list[torch.Tensor]:
        """On the device, the masters, or where they are elsewhere the copies that compute."""
        return [local(each.detach()) for each in self.parameters] if self.masters_on_host else self.masters

    def on_gradient(self, listener: Callable[[int], None]) -> None:
        """Call `listener(index)` in every backward pass, when it has added to a parameter's gradient.

        Only for weights that are not sharded: FSDP reduces by itself.
        """
        if self.moved:
            self._listeners.append(listener)
            return
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: listener(index))

    def _arrived(self, index: int) -> None:
        self._into_master(index)
        for listener in self._listeners:
            listener(index)

    def _into_master(self, index: int) -> None:
        """Move a gradient that backward made to the master's, adding up micro-batches there in its dtype."""
        parameter, holder = self.parameters[index], self.holders[index]
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        if holder.grad is None:
            holder.grad = gradient if index in self.narrow else gradient.to(holder.dtype)
        else:
            holder.grad = holder.grad.to(holder.dtype).add_(gradient)
        parameter.grad = None

    def collect_gradients(self) -> list[torch.Tensor]:
        """This rank's gradients, one per master, after backward and all reductions."""
        self.fetch_gradients()
        found = []
        for name, holder in zip(self.names, self.holders, strict=True):
            if holder.grad is None:
                raise RuntimeError(f"parameter {name} got no gradient")
            found.append(holder.grad)
        return found

    def fetch_gradients(self) -> None:
        """Bring to the masters what came without a hook: FSDP's sums, and gradients computed apart."""
        for index, (parameter, holder) in enumerate(zip(self.parameters, self.holders, strict=True)):
            if self.sharded:
                holder.grad = local(parameter.grad) if parameter.grad is not None else None
            elif self.moved and parameter.grad is not None:
                self._into_master(index)

    def clear_gradients(self) -> None:
        for parameter, holder in zip(self.parameters, self.holders, strict=True):
            parameter.grad = None
            holder.grad = None

    @torch.no_grad()
    def publish(self, indices: Iterable[int] | None = None) -> None:
        """After masters changed, these or all: let the model compute with the new values."""
        every = list(range(len(self.masters)) if indices is None else indices)
        if self.copied and every:
            copy_each([local(self.parameters[i]) for i in every], [self.masters[i] for i in every])
        if self.scales is not None:
            self.scales.find()

    def whole(self, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put `values`, one per master, together with the other ranks'; by parameter name, on rank 0 alone.

        For looking at small models: everything passes through rank 0. Every rank must call it.
        """
        mine: list[Any] = []
        for name, parameter, value in zip(self.names, self.parameters, values, strict=True):
            offset, _ = local_slab(parameter)
            # As arrays, which are pickled in a tenth of the time that tensors take, and know no bfloat16.
            known = value.detach().float() if value.dtype == torch.bfloat16 else value.detach()
            mine.append((name, tuple(parameter.shape), offset, known.cpu().numpy()))
        everyone: list[list[Any]] = [mine]
        if dist.is_initialized():
            everyone = [[] for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else []
            dist.gather_object(mine, everyone or None)
        found: dict[str, torch.Tensor] = {}
        for name, shape, offset, value in (entry for entries in everyone for entry in entries):
            part = torch.from_numpy(value)
            target = found.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))
            slab = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            target[slab] = part
        return found

    def whole_like(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """`values`, shaped like this rank's master `index`, as the distributed tensor it is a part of."""
        parameter = self.parameters[index]
        if not isinstance(parameter, DTensor):
            return values
        if self.offload:
            return distributed_as(values, parameter)
        return DTensor.from_local(
            values,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def named_parameters(parts: Sequence[nn.Module], tied: bool) -> list[tuple[str, nn.Parameter]]:
    """The parameters of this rank's stages, by the names that the whole model has for them."""
    return [
        (EMBEDDING if tied and name == TIED_OUTPUT else name, parameter)
        for part in parts
        for name, parameter in part.named_parameters()
    ]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; a plain tensor is all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Of the same shape and dtype on `device`, without memory: something to have a `.grad`."""
    return torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape)
