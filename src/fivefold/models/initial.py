"""Initial weights as a function of (seed, parameter name, global index) alone.

Every element is a hash of its own index, so any slab of a tensor can be made anywhere without the rest of it,
and however a model is split it starts from the same numbers.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fivefold.models.spec import ModelSpec

_TO_RESIDUAL = tuple(
    f".{part}.weight" for part in ("attention.output", "mlp.down", "mlp.experts.down", "mlp.shared.down")
)
# Elements worked on at a time: bounds the memory for float64 and int64 intermediates.
CHUNK = 1 << 20


def initial_values(
    spec: ModelSpec,
    name: str,
    shape: Sequence[int],
    seed: int,
    offset: Sequence[int] | None = None,
    local_shape: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The slab of parameter `name` that starts at `offset` and has `local_shape`; by default all of it.

    Norm weights are 1 (0 where the norm adds 1) and biases 0. The rest is normal with deviation
    `spec.init_std`, divided by sqrt(2 * layers) for the projections of a block that write to the residual
    stream.

    shape    the whole parameter's
    returns  [*local_shape], equal bit for bit to that slice of the whole on the same kind of device
    """
    shape = tuple(shape)
    offset = (0,) * len(shape) if offset is None else tuple(offset)
    local_shape = shape if local_shape is None else tuple(local_shape)
    if not len(offset) == len(local_shape) == len(shape):
        raise ValueError(f"{name}: offset {offset} and local shape {local_shape} do not fit shape {shape}")
    if any(o < 0 or n < 0 or o + n > size for o, n, size in zip(offset, local_shape, shape, strict=True)):
        raise ValueError(f"{name}: a slab {local_shape} at {offset} reaches outside of shape {shape}")
    slab = torch.empty(local_shape, dtype=dtype, device=device)
    if name.endswith("norm.weight"):
        return slab.fill_(0 if spec.norm_unit_offset else 1)
    if name.endswith(".bias"):
        return slab.fill_(0)
    std = spec.init_std
    if name.endswith(_TO_RESIDUAL):
        std /= math.sqrt(2 * spec.layers)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    _fill_normal(slab, _key(seed, name), std, list(offset), strides)
    return slab


@torch.no_grad()
def initialise(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill every parameter of a whole model in place; tied weights once."""
    for name, parameter in model.named_parameters():
        values = initial_values(
            spec, name, parameter.shape, seed, device=parameter.device, dtype=parameter.dtype
        )
        parameter.copy_(values)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _fill_normal(slab: Tensor, key: int, std: float, offset: list[int], strides: list[int]) -> None:
    """Fill a slab whose first element has global index offset . strides; large ones half by half."""
    if slab.numel() > CHUNK:
        axis = max(range(slab.dim()), key=lambda a: slab.shape[a])
        half = slab.shape[axis] // 2
        beyond = [place + half if a == axis else place for a, place in enumerate(offset)]
        _fill_normal(slab.narrow(axis, 0, half), key, std, offset, strides)
        _fill_normal(slab.narrow(axis, half, slab.shape[axis] - half), key, std, beyond, strides)
        return
    index = torch.zeros((), dtype=torch.int64, device=slab.device)
    for place, size, stride in zip(offset, slab.shape, strides, strict=True):
        along = torch.arange(place, place + size, device=slab.device) * stride
        index = index[..., None] + along
    slab.copy_(_normal(_scrambled(index, key)).mul_(std))


def _signed(constant: int) -> int:
    """An unsigned 64-bit constant as the int64 of the same bits."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_STEP, _FIRST, _SECOND = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _scrambled(index: Tensor, key: int) -> Tensor:
    """The splitmix64 generator of Steele, Lea and Flood (2014), started at `key` and read at each index.

    int64 arithmetic wraps, as the generator's unsigned one does; only its right shifts need care.
    """
    bits = index * _STEP + key
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Right shift that brings in zeros."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _normal(bits: Tensor) -> Tensor:
    """Standard normal values by Box and Muller: 32 random bits for the radius, 32 for the angle; float64.

    The radius' bits end at the middle of an interval, so it is never that of 0; values reach 6.7 deviations.
    """
    radius = (-2 * ((_shifted(bits, 32).double() + 0.5) * 2.0**-32).log_()).sqrt_()
    angle = (bits & 0xFFFFFFFF).double() * (2 * math.pi * 2.0**-32)
    return radius.mul_(angle.cos_())
