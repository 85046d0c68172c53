"""Weights that FSDP gathers in 8 bits: each rank casts its shard, by the scale of the whole weight.

FSDP asks the local tensor of a shard how to gather it. Only this one object is told: its aliases, and all
that is made from it (masters, states, files), are plain tensors.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fivefold.axes.runtime.fp8_numbers import E4M3, Scaled, cast
from fivefold.comm.compat import set_gather, without_memory

ATEN = torch.ops.aten
VIEWS = {ATEN.as_strided.default, ATEN.detach.default, ATEN.slice.Tensor, ATEN.view.default}


class GatheredWeight(Tensor):
    """A whole weight as it came: to autograd a tensor in bfloat16, whose gradients are, too.

    numbers  in e4m3: the true ones times `scale`, rounded

    Views of it are ones of its numbers. Nothing else can be done with it but to take the numbers: what
    computes in bfloat16 must not be given rounded weights unawares.
    """

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> "GatheredWeight":
        made: GatheredWeight = without_memory(cls, numbers, torch.bfloat16)
        made.numbers, made.scale = numbers, scale
        return made

    @property
    def scaled(self) -> Scaled:
        return Scaled(self.numbers, self.scale)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in VIEWS:
            raise TypeError(f"{func} of a weight gathered in 8 bits, which only products in 8 bits take")
        weight, *others = args
        return cls(func(weight.numbers, *others, **(kwargs or {})), weight.scale)

    # What compilers take it apart by, and put it together.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], unused: None, size: Any, stride: Any
    ) -> "GatheredWeight":
        return GatheredWeight(parts["numbers"], parts["scale"])


class In8Bits:
    """How FSDP gathers one weight: as bytes, which every backend can send.

    shard  float32 [this rank's rows, in], of which layers see what it is in bfloat16
    scale  of the whole weight, in a tensor that is there to stay
    """

    def __init__(self, shard: Tensor, scale: Tensor):
        self.shard, self.scale = shard.detach(), scale

    def before(
        self, mesh: DeviceMesh, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """What this rank sends: as many rows as every other."""
        narrow = cast(self.shard.bfloat16(), self.scale, E4M3).values.view(torch.uint8)
        missing = -(-size[0] // mesh.size()) - len(narrow)
        return (F.pad(narrow, (0, 0, 0, missing)) if missing else narrow,), None

    def after(
        self, gathered: tuple[Tensor], told: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """The weight, at the first time; later it is in the same memory, which FSDP frees and takes again."""
        if out is not None:
            return None
        return GatheredWeight(gathered[0].view(E4M3), self.scale), ()


def gather_in_8_bits(parameter: DTensor, scale: Tensor) -> None:
    """Let FSDP gather a parameter in 8 bits, of a model that has its memory and has not been run yet.

    scale  of the whole weight; its value may change between gathers
    """
    how = In8Bits(parameter.to_local(), scale)
    set_gather(parameter, how.before, how.after)
