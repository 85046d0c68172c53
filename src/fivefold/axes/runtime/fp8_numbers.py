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

from fivefold.axes.runtime.fp8_passes import (
    cast_both,
    cast_columns,
    cast_rows,
    largest_magnitudes,
    plain_largest,
    rounded,
)
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
    (found,) = _largest(x, dim == 1, dim == 0)
    return largest_of_all(found, group)


def largest_both(x: Tensor, group: Group = None) -> tuple[Tensor, Tensor]:
    """As `largest` of rows, with its group, and of columns, without: [rows, 1] and [1, columns]."""
    of_rows, of_columns = _largest(x, True, True)
    return largest_of_all(of_rows, group), of_columns


def _largest(x: Tensor, of_rows: bool, of_columns: bool) -> list[Tensor]:
    how = plain_largest if torch.compiler.is_compiling() else largest_magnitudes
    found: list[Tensor] = how(x.detach(), of_rows, of_columns)
    return found


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
    power = torch.where(amax == 0, 1.0, power)
    # NaN by computing: compilers do not see that two operations are the same if NaN is an argument of them.
    return torch.where(torch.isfinite(amax), power, amax - amax)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Scaled:
    """A matrix [rows, columns] in 8 bits, rounded to nearest."""
    return Scaled(rounded(x.detach(), scale, dtype), scale)


def cast_for_left(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Scaled:
    """As `cast`, to be the left matrix of a product, or turned the right one: row by row in memory."""
    return Scaled(cast_rows(x.detach(), scale, dtype), scale)


def cast_for_right(x: Tensor, scale: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Scaled:
    """As `cast`, to be the right matrix of a product, or turned the left one: column by column in memory.

    after  made no earlier than this
    """
    turned: Tensor = cast_columns(x.detach(), scale, dtype, after)
    return Scaled(turned.t(), scale)


def turned_for_right(x: Scaled) -> Scaled:
    """What lies row by row, column by column."""
    return Scaled(x.values.t().clone(memory_format=torch.contiguous_format).t(), x.scale)


def cast_for_both(
    x: Tensor, of_rows: Tensor, of_columns: Tensor, dtype: torch.dtype
) -> tuple[Scaled, Scaled]:
    """As `cast_for_left` by scales of rows and `cast_for_right` by those of columns, or both by one scale."""
    values, turned = cast_both(x.detach(), of_rows, of_columns, dtype)
    return Scaled(values, of_rows), Scaled(turned.t(), of_columns)


def product(a: Scaled, b: Scaled, fast: bool = False) -> Tensor:
    """a [rows, inner] times b [inner, columns], in bfloat16.

    Scales are of all numbers, or of the rows of `a` and the columns of `b`. On a GPU `a` lies row by row in
    memory and `b` column by column, since kernels take nothing else.

    fast  a GPU adds up with fewer bits (about 14 of fraction) in place of 24 from time to time
    """
    result: Tensor = scaled_product(a.values, 1 / a.scale, b.values, 1 / b.scale, fast)
    return result


def _like_product(a: Tensor, inverse_a: Tensor, b: Tensor, inverse_b: Tensor, fast: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)


# An operator, so that selective recomputation keeps its result, and compilers see one thing.
@operator(_like_product)
def scaled_product(a: Tensor, inverse_a: Tensor, b: Tensor, inverse_b: Tensor, fast: bool) -> Tensor:
    """As `product`, by the inverse of scales. On a CPU in float32, with one rounding at the end."""
    if not a.is_cuda:
        return (torch.mm(a.float(), b.float()) * inverse_a * inverse_b).to(torch.bfloat16)
    from torch.nn.functional import ScalingType

    kind = ScalingType.RowWise if inverse_a.dim() else ScalingType.TensorWise
    return F.scaled_mm(
        *(a, b, inverse_a, kind, inverse_b, kind),
        output_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
