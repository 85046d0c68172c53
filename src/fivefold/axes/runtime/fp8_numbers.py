"""Numbers of 8 bits: scales, casts, and products of them that give bfloat16.

    e4m3   weights and activations: 3 bits of fraction, up to 448
    e5m2   gradients of outputs: 2 bits of fraction, up to 57344

A scale is a power of two, so scaling itself is exact, and the cast is the only rounding: a relative error of
at most 2^-4 (e4m3) or 2^-3 (e5m2), and of tiny numbers an absolute one of half the smallest step there is.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.comm.collectives import Group, summed
from fivefold.operators import operator

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: (8, 0x600000), E5M2: (15, 0x600000)}
"""The largest number of a format: its exponent, and its fraction in 23 bits."""
MOST_DOUBLINGS = 126
"""Of a scale, so that its inverse is a normal float32, too."""


class Scaled(NamedTuple):
    """A matrix in 8 bits: `values` are the true numbers times `scale`.

    scale  float32: of all numbers [], of rows [rows, 1], or of columns [1, columns]
    """

    values: Tensor
    scale: Tensor

    def turned(self) -> "Scaled":
        return Scaled(self.values.t(), self.scale.t())


def largest(x: Tensor, dim: int | None = None, group: Group = None) -> Tensor:
    """The largest magnitude in a matrix [], or along one of its dimensions, which stays as 1; in float32.

    group  ranks of which each has some of what is looked at: the largest of all of them
    NaN where there is a NaN.
    """
    magnitudes = x.detach().abs()
    found = magnitudes.amax() if dim is None else magnitudes.amax(dim, keepdim=True)
    return largest_of_all(found.float(), group)


def largest_of_all(x: Tensor, group: Group) -> Tensor:
    """The maximum over ranks, of float32 numbers that are not negative.

    As integers, whose order is the same: no backend says what is the larger of a number and NaN.
    """
    return x if group is None else summed(x.view(torch.int32), group, "max").view(torch.float32)


def scale_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two times which `amax` (float32) is still a number of `dtype`; 1 for 0.

    NaN where `amax` is not finite: what is scaled by it is then no number either, and nothing hides that.
    """
    exponent, fraction = LARGEST[dtype]
    bits = amax.view(torch.int32)
    doublings = exponent - ((bits >> 23) - 127) - ((bits & 0x7FFFFF) > fraction).int()
    power = ((doublings.clamp(max=MOST_DOUBLINGS) + 127) << 23).view(torch.float32)
    power = torch.where(amax == 0, torch.ones_like(power), power)
    return torch.where(torch.isfinite(amax), power, torch.full_like(power, torch.nan))


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Scaled:
    """A matrix [rows, columns] in 8 bits, rounded to nearest."""
    return Scaled((x.detach().float() * scale).to(dtype), scale)


def product(a: Scaled, b: Scaled) -> Tensor:
    """a [rows, inner] times b [inner, columns], in bfloat16.

    Scales are of all numbers, or of the rows of `a` and the columns of `b`.
    """
    result: Tensor = scaled_product(a.values, a.scale, b.values, b.scale)
    return result


def _like_product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)


# An operator, so that selective recomputation keeps its result, and compilers see one thing.
@operator(_like_product)
def scaled_product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """As `product`. On a CPU in float32, with one rounding at the end."""
    if not a.is_cuda:
        return (torch.mm(a.float(), b.float()) / scale_a / scale_b).to(torch.bfloat16)
    from torch.nn.functional import ScalingType

    kind = ScalingType.RowWise if scale_a.dim() else ScalingType.TensorWise
    # The kernel takes a row-major matrix times a column-major one, and the inverse of our scales.
    a, b = a.contiguous(), b.t().contiguous().t()
    return F.scaled_mm(
        *(a, b, 1 / scale_a, kind, 1 / scale_b, kind),
        output_dtype=torch.bfloat16,
    )
