"""The weights that the optimizer updates, and how gradients reach them.

The model computes with weights of the compute dtype; the optimizer updates master weights, which are plain
tensors: this rank's part of each. Depending on how the model was split the two are

    the same tensors        zero 0, in fp32 or fp64
    a copy of each other    zero 0, in bf16 or fp16: masters are a float32 copy
    shards and gathers      zero 1 to 3: masters are FSDP's shards, compute weights what it gathers

and the training step sees only `masters`, their `.grad`, and a few verbs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fivefold.axes.runtime.data_split import local_slab
from fivefold.axes.runtime.fp8_split import WeightScales
from fivefold.comm.compat import copy_each
from fivefold.ledger.precision import Precision
from fivefold.models.inventory import EMBEDDING

TIED_OUTPUT = "head.output.weight"
"""What a stage without the embedding calls its own copy of it, when the two are tied."""


class Weights:
    """This rank's master weights, by parameter name.

    names       parameter names, in the model's order; a tied embedding that two stages of this rank use is
                there twice
    parameters  the model's own parameters (DTensors when split or sharded)
    masters     what the optimizer updates: plain local tensors, one per parameter
    sharded     whether FSDP keeps the masters and reduces their gradients
    scales      of weights that are multiplied in 8 bits, where there are any
    """

    def __init__(self, parts: Sequence[nn.Module], precision: Precision, *, sharded: bool, tied: bool):
        named = named_parameters(parts, tied)
        self.names = [name for name, _ in named]
        self.sharded = sharded
        self.scales: WeightScales | None = None
        split = any(isinstance(parameter, DTensor) for _, parameter in named)
        self.copied = precision.mixed and not sharded
        self.moved = self.copied or (split and not sharded)
        self._listeners: list[Callable[[int], None]] = []
        self.masters: list[torch.Tensor]
        if self.copied:
            self.masters = [local(parameter.detach()).clone() for _, parameter in named]
            for part in parts:
                part.to(getattr(torch, precision.compute))
        elif split:
            self.masters = [local(parameter.detach()) for _, parameter in named]
        else:
            self.masters = [parameter for _, parameter in named]
        self.parameters: list[torch.Tensor] = [parameter for _, parameter in named_parameters(parts, tied)]
        if self.moved:
            for index, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))

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
        """Move a gradient that backward made to the master's, adding up micro-batches there."""
        parameter, master = self.parameters[index], self.masters[index]
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    def collect_gradients(self) -> list[torch.Tensor]:
        """This rank's gradients, one per master, after backward and all reductions."""
        self.fetch_gradients()
        found = []
        for name, master in zip(self.names, self.masters, strict=True):
            if master.grad is None:
                raise RuntimeError(f"parameter {name} got no gradient")
            found.append(master.grad)
        return found

    def fetch_gradients(self) -> None:
        """Bring to the masters what came without a hook: FSDP's sums, and gradients computed apart."""
        for index, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            if self.sharded:
                master.grad = local(parameter.grad) if parameter.grad is not None else None
            elif self.moved and parameter.grad is not None:
                self._into_master(index)

    def clear_gradients(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.grad = None
            master.grad = None

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
            # As arrays, which are pickled in a tenth of the time that tensors take.
            mine.append((name, tuple(parameter.shape), offset, value.detach().cpu().numpy()))
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
