"""The weights that the optimizer updates, and how gradients reach them.

The model computes with weights of the compute dtype; the optimizer updates master weights. Depending on
how the model was split the two are

    the same tensors        one process or zero 0, in fp32 or fp64
    a copy of each other    one process or zero 0, in bf16 or fp16: masters are a float32 copy
    shards and gathers      zero 1 to 3: masters are FSDP's shards, compute weights what it gathers

and the training step sees only `masters`, their `.grad`, and the three verbs below.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fivefold.ledger.precision import Precision


class Weights:
    """This rank's master weights, by parameter name.

    names       parameter names, in the model's order
    parameters  the model's own parameters (DTensors when sharded)
    masters     what the optimizer updates: plain local tensors, one per parameter
    """

    def __init__(self, model: nn.Module, precision: Precision):
        named = list(model.named_parameters())
        self.names = [name for name, _ in named]
        self.sharded = any(isinstance(parameter, DTensor) for _, parameter in named)
        self.copied = precision.mixed and not self.sharded
        self._listeners: list[Callable[[int], None]] = []
        self.masters: list[torch.Tensor]
        if self.sharded:
            self.masters = [local(parameter.detach()) for _, parameter in named]
        elif self.copied:
            self.masters = [parameter.detach().clone() for _, parameter in named]
            model.to(getattr(torch, precision.compute))
        else:
            self.masters = [parameter for _, parameter in named]
        self.parameters: list[torch.Tensor] = list(model.parameters())
        if self.copied:
            for index, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(self._into_master(index))

    def on_gradient(self, listener: Callable[[int], None]) -> None:
        """Call `listener(index)` in every backward pass, when the gradient of a parameter is complete.

        Only for weights that are not sharded: FSDP reduces by itself.
        """
        if self.copied:
            self._listeners.append(listener)
            return
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: listener(index))

    def _into_master(self, index: int) -> Callable[[torch.Tensor], None]:
        """A hook that moves a compute-dtype gradient into the master's, adding up micro-batches there."""
        master = self.masters[index]

        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None
            for listener in self._listeners:
                listener(index)

        return hook

    def collect_gradients(self) -> list[torch.Tensor]:
        """This rank's gradients, one per master, after backward and all reductions."""
        if self.sharded:
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                master.grad = local(parameter.grad) if parameter.grad is not None else None
        found = []
        for name, master in zip(self.names, self.masters, strict=True):
            if master.grad is None:
                raise RuntimeError(f"parameter {name} got no gradient")
            found.append(master.grad)
        return found

    def clear_gradients(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.grad = None
            master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """After the masters changed: let the model compute with the new values."""
        if self.copied:
            torch._foreach_copy_(self.parameters, self.masters)

    def whole(self, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put this rank's `values`, one per master, together with the other ranks'; by parameter name."""
        named = {}
        for index, name in enumerate(self.names):
            tensor = self.whole_like(index, values[index].detach())
            named[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        return named

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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; a plain tensor is all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
