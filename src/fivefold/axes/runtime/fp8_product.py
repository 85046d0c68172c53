"""A linear layer's three products in 8 bits, with its gradients.

    forward    y = x w^T     rows of x,     rows of w       e4m3, e4m3
    input      g w           rows of g,     columns of w    e5m2, e4m3
    weight     g^T x         columns of g,  columns of x    e5m2, e4m3

tensorwise: one scale for each of x, w and g. rowwise: one for each row or column named above. Inputs and
gradients are cast for both their products in one pass. What backward needs of x is kept in 8 bits, as the
last product takes it.

All of it can be compiled into one graph with what is around it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fivefold.axes.runtime.fp8_gather import GatheredWeight
from fivefold.axes.runtime.fp8_numbers import (
    E4M3,
    E5M2,
    Scaled,
    cast_for_both,
    cast_for_left,
    cast_for_right,
    largest,
    largest_both,
    product,
    scale_for,
    turned_for_right,
)
from fivefold.comm.collectives import Group
from fivefold.comm.compat import is_wanted


class Input:
    """What several layers read: cast once, by the first of them, and let go by the last.

    Compilers need none: they see that layers make the same casts, and make them once.
    """

    def __init__(self, readers: int):
        self.readers = self.left = readers
        self.x: Tensor | None = None
        self.casts: tuple[Scaled, Scaled] | None = None


class Fp8Product(nn.Module):
    """Takes the place of `F.linear` in one layer.

    name     the layer's, such as "blocks.3.attention.query"
    rowwise  otherwise tensorwise: then `weight_scale` must be set, and be that of the whole weight
    reads    its input, shared with other layers that read the same
    inputs   ranks that have some of its inputs each
    outputs  ranks that have some of its outputs each
    spoilt   [2] bool: whether its weight, and its input, were not finite since that was last asked
    """

    weight_scale: Tensor
    spoilt: Tensor

    def __init__(self, name: str, rowwise: bool, reads: Input, inputs: Group, outputs: Group):
        super().__init__()
        self.name, self.rowwise, self.reads = name, rowwise, reads
        self.inputs, self.outputs = inputs, outputs
        self.register_buffer("spoilt", torch.zeros(2, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in], weight [out, in], bias [out] -> [..., out]."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        used, kept = self._casts(x, flat)
        rows = weight_rows(weight, None if self.rowwise else self.weight_scale, self.inputs)
        self.spoilt.logical_or_(torch.stack([is_spoilt(rows.scale), is_spoilt(used.scale)]))
        # A view of the weight, since autograd cannot say of a leaf whether its gradient is wanted now. And
        # compilers do not take one tensor for two arguments.
        matrices = flat, weight.view_as(weight), used.values, kept.values, rows.values
        scales = used.scale, kept.scale if self.rowwise else None, rows.scale
        result: Tensor = _Product.apply(*matrices, *scales, self.outputs)  # type: ignore[no-untyped-call]
        result = result.view(*x.shape[:-1], -1)
        return result if bias is None else result + bias

    def _casts(self, x: Tensor, flat: Tensor) -> tuple[Scaled, Scaled]:
        """The input as forward uses it, and as backward does."""
        if torch.compiler.is_compiling():
            return self._cast(flat)
        shared = self.reads
        if shared.x is not x:
            shared.x, shared.casts, shared.left = x, self._cast(flat), shared.readers
        assert shared.casts is not None
        found, shared.left = shared.casts, shared.left - 1
        if shared.left == 0:
            shared.x = shared.casts = None
        return found

    def _cast(self, flat: Tensor) -> tuple[Scaled, Scaled]:
        return cast_for_both(flat, *_scales(flat, self.rowwise, E4M3, self.inputs), E4M3)


def weight_rows(weight: Tensor, scale: Tensor | None, group: Group) -> Scaled:
    """A weight as forward takes it. Without a scale each row has its own, of what all ranks have of it."""
    if isinstance(weight, GatheredWeight):
        return weight.scaled
    if scale is None:
        scale = scale_for(largest(weight, 1, group), E4M3)
    return cast_for_left(weight, scale, E4M3)


def weight_columns(weight: Tensor, scale: Tensor | None, group: Group, after: Tensor) -> Scaled:
    """As backward takes it, where it is cast anew: in 8 bits all weights are too much to keep as well.

    after  something that only backward has
    """
    if isinstance(weight, GatheredWeight):
        return turned_for_right(weight.scaled)
    if scale is None:
        scale = scale_for(largest(weight, 0, group), E4M3)
    return cast_for_right(weight, scale, E4M3, after)


def _scales(x: Tensor, rowwise: bool, dtype: torch.dtype, group: Group) -> tuple[Tensor, Tensor]:
    """Of the rows of an input or gradient, which ranks have parts of, and of its columns; or twice of all."""
    if rowwise:
        of_rows, of_columns = largest_both(x, group)
        return scale_for(of_rows, dtype), scale_for(of_columns, dtype)
    scale = scale_for(largest(x, None, group), dtype)
    return scale, scale


def is_spoilt(scale: Tensor) -> Tensor:
    """Whether something of what is scaled so was not finite."""
    return scale.isnan().any()


class _Product(torch.autograd.Function):
    """x [tokens, in], weight [out, in] -> [tokens, out]; x as `used` now, and as `kept` for later.

    narrow      the weight, as it is used now
    kept_scale  None: that of `used`, since all scales are of whole matrices
    outputs     ranks that have some of the outputs each
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        used: Tensor,
        kept: Tensor,
        narrow: Tensor,
        used_scale: Tensor,
        kept_scale: Tensor | None,
        narrow_scale: Tensor,
        outputs: Group,
    ) -> Tensor:
        ctx.rowwise, ctx.outputs, ctx.found = kept_scale is not None, outputs, None
        scales = (None, kept_scale) if ctx.rowwise else (narrow_scale, used_scale)
        ctx.save_for_backward(weight, kept, *scales)
        return product(Scaled(used, used_scale), Scaled(narrow, narrow_scale).turned(), fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient = grads[0].contiguous()
        weight, kept, weight_scale, kept_scale = ctx.saved_tensors  # once: recomputed, each is given once
        wants_x, wants_weight = is_wanted(ctx, 0), is_wanted(ctx, 1)
        rows, columns = _gradient_casts(ctx, gradient, wants_x, wants_weight)
        of_x = of_weight = None
        if rows is not None:
            of_x = product(rows, weight_columns(weight, weight_scale, ctx.outputs, rows.values))
        if columns is not None:
            of_weight = product(columns.turned(), Scaled(kept, kept_scale))
        return of_x, of_weight, *[None] * 7


def _gradient_casts(
    ctx: Any, gradient: Tensor, wants_x: bool, wants_weight: bool
) -> tuple[Scaled | None, Scaled | None]:
    """By rows for the gradient of x, by columns for that of the weight; what is not wanted is None."""
    if wants_x and wants_weight:
        return cast_for_both(gradient, *_scales(gradient, ctx.rowwise, E5M2, ctx.outputs), E5M2)
    # A schedule that cuts backward comes twice with one gradient: one scale is found the first time.
    scale = ctx.found
    if scale is None:
        dim, group = (None, ctx.outputs) if not ctx.rowwise else (1, ctx.outputs) if wants_x else (0, None)
        scale = scale_for(largest(gradient, dim, group), E5M2)
        ctx.found = None if ctx.rowwise else scale
    if wants_x:
        return cast_for_left(gradient, scale, E5M2), None
    return None, cast_for_right(gradient, scale, E5M2) if wants_weight else None
