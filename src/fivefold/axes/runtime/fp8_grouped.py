"""Products of routed experts in 8 bits: rows sorted by expert, each group times its expert's matrix.

    forward    y = x w^T     rows of x,               rows of each w       [N, in], [E, out, in]
    input      g w           rows of g,               columns of each w    [N, out], [E, out, in]
    weight     g^T x         columns of g in a group, those of x in it     one sum over rows a group

tensorwise: one scale for all rows here, one for the whole stack of weights. rowwise: one for each row or
column named above. All is e4m3, gradients too: the GPU's kernel for groups takes nothing else. What backward
needs of the rows is kept in 8 bits. Groups may have any size, and be empty.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.axes.runtime.fp8_numbers import E4M3, Scaled, cast, largest, scale_for
from fivefold.axes.runtime.fp8_product import Input, is_spoilt
from fivefold.comm.collectives import Group
from fivefold.comm.compat import is_wanted
from fivefold.ledger.fp8 import MULTIPLE
from fivefold.models.grouped import add_bias, group_of_rows
from fivefold.operators import operator

Casts = tuple[Scaled, Scaled]


class GroupedProduct(nn.Module):
    """Takes the place of `grouped_linear` in one stacked layer. Its arguments are those of `Fp8Product`."""

    weight_scale: Tensor
    spoilt: Tensor

    def __init__(self, name: str, rowwise: bool, reads: Input, inputs: Group, outputs: Group):
        super().__init__()
        self.name, self.rowwise, self.reads = name, rowwise, reads
        self.inputs, self.outputs = inputs, outputs
        self.register_buffer("spoilt", torch.zeros(2, dtype=torch.bool), persistent=False)

    def forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
        """rows [N, in], sorted by expert; weight [E, out, in], bias [E, out], counts [E] -> [N, out]."""
        used, kept = self._casts(rows, counts)
        narrow = self.weight_rows(weight)
        self.spoilt.logical_or_(torch.stack([is_spoilt(narrow.scale), is_spoilt(used.scale)]))
        # Views, since autograd cannot say of a leaf whether its gradient is wanted now.
        leaves = rows.view_as(rows), weight.view_as(weight)
        result: Tensor = _Product.apply(*leaves, self, counts, *used, *kept, *narrow)  # type: ignore[no-untyped-call]
        return add_bias(result, bias, counts)

    def _casts(self, rows: Tensor, counts: Tensor) -> Casts:
        """The rows as forward uses them, and as backward does: shared by layers that read the same."""
        shared = self.reads
        if shared.x is not rows:
            used = self._by_row(rows.detach(), self.inputs)
            kept = _by_column(rows.detach(), counts) if self.rowwise else used
            shared.x, shared.casts, shared.left = rows, (used, kept), shared.readers
        assert shared.casts is not None
        found, shared.left = shared.casts, shared.left - 1
        if shared.left == 0:
            shared.x = shared.casts = None
        return found

    def weight_rows(self, weight: Tensor) -> Scaled:
        """[E, out, in] -> [E, in, out], scaled by expert and output; or all alike."""
        return _turned(self._weight(weight, self.inputs))

    def weight_columns(self, weight: Tensor) -> Scaled:
        """[E, out, in], scaled by expert and input; or all alike."""
        if not self.rowwise:
            return self._weight(weight, None)
        return _turned(self._weight(weight.transpose(1, 2), self.outputs))

    def _weight(self, weight: Tensor, group: Group) -> Scaled:
        """Matrices [E, rows, columns], scaled by the rows of each [E, rows]; or all alike []."""
        flat = weight.detach().reshape(-1, weight.shape[2])
        if self.rowwise:
            found = self._by_row(flat, group)
            return Scaled(found.values.view(weight.shape), found.scale.view(weight.shape[:2]))
        return Scaled(cast(flat, self.weight_scale, E4M3).values.view(weight.shape), self.weight_scale)

    def gradient_rows(self, gradient: Tensor) -> Scaled:
        return self._by_row(gradient, self.outputs)

    def gradient_columns(self, gradient: Tensor, counts: Tensor) -> Scaled:
        return _by_column(gradient, counts)

    def _by_row(self, x: Tensor, group: Group) -> Scaled:
        """A matrix scaled by the largest of each row among the ranks of a group; or of all of it."""
        # Of no rows there is no largest: one of zeros stands in for them.
        some = x if len(x) else x.new_zeros(1, x.shape[1])
        scale = scale_for(largest(some, 1 if self.rowwise else None, group), E4M3)
        return cast(x, scale, E4M3)


def _by_column(x: Tensor, counts: Tensor) -> Scaled:
    """Rows [N, features], scaled by the largest of each column of a group: [E, features]."""
    amax = torch.segment_reduce(x.abs(), "max", lengths=counts, initial=0, unsafe=True).float()
    scale = scale_for(amax, E4M3)
    # Powers of two: in bfloat16 they are the same, and so is what they are multiplied with.
    each = scale.bfloat16().repeat_interleave(counts, dim=0, output_size=len(x))
    return Scaled((x * each).to(E4M3), scale)


def _turned(x: Scaled) -> Scaled:
    return Scaled(x.values.transpose(1, 2), x.scale)


class _Product(torch.autograd.Function):
    """rows [N, in], weight [E, out, in] -> [N, out]; rows as `used` now, and as `kept` for later.

    narrow  the weight, as it is used now [E, in, out]
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        layer: GroupedProduct,
        counts: Tensor,
        used: Tensor,
        used_scale: Tensor,
        kept: Tensor,
        kept_scale: Tensor,
        narrow: Tensor,
        narrow_scale: Tensor,
    ) -> Tensor:
        ctx.layer, ctx.gradient_scale = layer, None
        ctx.save_for_backward(weight, counts, kept, kept_scale)
        product: Tensor = scaled_group_product(used, used_scale, narrow, narrow_scale, counts)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        layer, gradient = ctx.layer, grads[0]
        weight, counts, *kept = ctx.saved_tensors  # once: recomputation gives each a single time
        wants_rows, wants_weight = is_wanted(ctx, 0), is_wanted(ctx, 1)
        whole = of_rows = of_weight = None
        if not layer.rowwise:
            # A schedule that cuts backward comes twice with one gradient: its scale is found the first time.
            found = None if wants_rows else ctx.gradient_scale
            whole = layer.gradient_rows(gradient) if found is None else cast(gradient, found, E4M3)
            ctx.gradient_scale = whole.scale
        if wants_rows:
            by_row = whole or layer.gradient_rows(gradient)
            of_rows = scaled_group_product(*by_row, *layer.weight_columns(weight), counts)
        if wants_weight:
            by_column = whole or layer.gradient_columns(gradient, counts)
            of_weight = scaled_group_sums(*by_column, *kept, counts)
        return of_rows, of_weight, *[None] * 8


# --- the products ------------------------------------------------------------------------------------------


def _like_product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, counts: Tensor) -> Tensor:
    return a.new_empty(len(a), b.shape[2], dtype=torch.bfloat16)


# Operators, so that selective recomputation keeps their results.
@operator(_like_product)
def scaled_group_product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, counts: Tensor) -> Tensor:
    """Each group's rows times its matrix. On a CPU in float32, with one rounding at the end.

    a        [N, inner] in 8 bits; its scale is [], or of each row [N, 1]
    b        [E, inner, columns]; its scale is [], or of each column [E, columns]
    counts   [E] int64, rows in each group
    returns  [N, columns] in bfloat16
    """
    of_rows, of_columns = scale_a.expand(len(a), 1), scale_b.expand(len(b), b.shape[2])
    if a.is_cuda:
        return product_by_kernel(a, of_rows, b, of_columns, counts)
    sizes = counts.tolist()
    groups = zip(a.float().split(sizes), of_rows.split(sizes), b.float(), of_columns, strict=True)
    return torch.cat([torch.mm(x, y) / u / v for x, u, y, v in groups]).bfloat16()


def _like_sums(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, counts: Tensor) -> Tensor:
    return a.new_empty(len(counts), a.shape[1], b.shape[1], dtype=torch.bfloat16)


@operator(_like_sums)
def scaled_group_sums(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, counts: Tensor) -> Tensor:
    """Of each group the sum over its rows of products of their numbers: zeros where it has none.

    a, b     [N, left], [N, right] in 8 bits; scales are [], or of each column of a group [E, left or right]
    counts   [E] int64, rows in each group
    returns  [E, left, right] in bfloat16
    """
    of_left, of_right = scale_a.expand(len(counts), a.shape[1]), scale_b.expand(len(counts), b.shape[1])
    if a.is_cuda:
        return sums_by_kernel(a, of_left, b, of_right, counts)
    sizes = counts.tolist()
    groups = zip(a.float().split(sizes), of_left, b.float().split(sizes), of_right, strict=True)
    return torch.stack([torch.mm(x.t(), y) / u[:, None] / v for x, u, y, v in groups]).bfloat16()


# --- by the GPU's kernel -----------------------------------------------------------------------------------

# It takes rows and columns in one piece each, the inverse of our scales, one for every row and column, and
# where groups end.


def product_by_kernel(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, counts: Tensor) -> Tensor:
    """As `scaled_group_product`, with scales [N, 1] and [E, columns]."""
    if not len(a):
        return a.new_empty(0, b.shape[2], dtype=torch.bfloat16)
    columns, ends = b.transpose(1, 2).contiguous().transpose(1, 2), counts.cumsum(0).int()
    return grouped_kernel(a.contiguous(), 1 / scale_a.flatten(), columns, 1 / scale_b, ends)


def sums_by_kernel(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, counts: Tensor) -> Tensor:
    """As `scaled_group_sums`, with scales [E, left] and [E, right]."""
    places, ends, rows = filled_up(counts, len(a))
    left, right = (_spread(x, places, rows) for x in (a, b))
    return grouped_kernel(left, 1 / scale_a.flatten(), right.t(), 1 / scale_b.flatten(), ends)


def grouped_kernel(a: Tensor, inverse_a: Tensor, b: Tensor, inverse_b: Tensor, ends: Tensor) -> Tensor:
    """Torch's (2.10 and later), for GPUs of compute capability 9.0 and 10.0. Both matrices are e4m3.

    a [N, inner], b [E, inner, columns]: groups of rows, of any size         -> [N, columns]
    a [left, N], b [N, right]: groups along what is summed, of multiples of
    16, none of them empty; scales of all groups one after the other         -> [E, left, right]
    """
    kind, scales = F.ScalingType.RowWise, (inverse_a.contiguous(), inverse_b.contiguous())
    result: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        *(a, b, scales[0], kind, scales[1], kind), offs=ends, output_dtype=torch.bfloat16
    )
    return result


def filled_up(counts: Tensor, rows: int) -> tuple[Tensor, Tensor, int]:
    """Where rows come to lie if each group is filled up to a multiple of `MULTIPLE`, an empty one too.

    The kernel wants groups so along which it sums. How many rows that makes is known without waiting for the
    device only as the most that it can be.

    counts   [E] int64, which add up to `rows`
    returns  each row's new place [rows], the groups' ends [E] int32, and how many places there are
    """
    sizes = (counts.clamp(min=1) + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    moved = (sizes - counts).cumsum(0) - (sizes - counts)
    places = torch.arange(rows, device=counts.device) + moved[group_of_rows(counts, rows)]
    most = -(-rows // MULTIPLE) * MULTIPLE + MULTIPLE * len(counts)
    return places, sizes.cumsum(0).int(), most


def _spread(x: Tensor, places: Tensor, rows: int) -> Tensor:
    """Numbers in 8 bits [N, features] -> turned [features, rows], each row at its place among zeros."""
    wider = x.new_zeros(x.shape[1], rows, dtype=torch.uint8)
    return wider.index_copy_(1, places, x.view(torch.uint8).t()).view(x.dtype)
