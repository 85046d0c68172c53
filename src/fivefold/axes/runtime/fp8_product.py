"""A linear layer's three products in 8 bits, with its gradients.

    forward    y = x w^T     rows of x,     rows of w       e4m3, e4m3
    input      g w           rows of g,     columns of w    e5m2, e4m3
    weight     g^T x         columns of g,  columns of x    e5m2, e4m3

tensorwise: one scale for each of x, w and g. rowwise: one for each row or column named above, so each product
casts for itself. What backward needs of x is kept in 8 bits.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fivefold.axes.runtime.fp8_gather import GatheredWeight
from fivefold.axes.runtime.fp8_numbers import E4M3, E5M2, Scaled, cast, largest, product, scale_for
from fivefold.comm.collectives import Group
from fivefold.comm.compat import is_wanted


class Input:
    """What several layers read: cast once, by the first of them, and let go by the last."""

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
    seen     the largest magnitudes of its input, weight and output gradient: not finite once one was not
    """

    weight_scale: Tensor

    def __init__(self, name: str, rowwise: bool, reads: Input, inputs: Group, outputs: Group):
        super().__init__()
        self.name, self.rowwise, self.reads = name, rowwise, reads
        self.inputs, self.outputs = inputs, outputs
        self.seen: dict[str, Tensor] = {}

    # Not compiled: layers hand casts on to each other, and the function below asks autograd what is wanted.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in], weight [out, in], bias [out] -> [..., out]."""
        used, kept = self._casts(x)
        flat = x.contiguous().view(-1, x.shape[-1])
        # A view of the weight, since autograd cannot say of a leaf whether its gradient is wanted now.
        result: Tensor = _Product.apply(flat, weight.view_as(weight), self, *used, *kept)  # type: ignore[no-untyped-call]
        result = result.view(*x.shape[:-1], -1)
        return result if bias is None else result + bias

    def _casts(self, x: Tensor) -> tuple[Scaled, Scaled]:
        """The input as forward uses it, and as backward does."""
        shared = self.reads
        if shared.x is not x:
            flat = x.detach().reshape(-1, x.shape[-1])
            rows = self._cast("input", flat, 1, E4M3, self.inputs)
            columns = self._cast("input", flat, 0, E4M3, None) if self.rowwise else rows
            shared.x, shared.casts, shared.left = x, (rows, columns), shared.readers
        assert shared.casts is not None
        found, shared.left = shared.casts, shared.left - 1
        if shared.left == 0:
            shared.x = shared.casts = None
        return found

    def weight_rows(self, weight: Tensor) -> Scaled:
        return self._weight(weight, 1, self.inputs)

    def weight_columns(self, weight: Tensor) -> Scaled:
        return self._weight(weight, 0, self.outputs)

    def _weight(self, weight: Tensor, dim: int, group: Group) -> Scaled:
        if self.rowwise:
            return self._cast("weight", weight, dim, E4M3, group)
        self._note("weight", self.weight_scale)
        return weight.scaled if isinstance(weight, GatheredWeight) else cast(weight, self.weight_scale, E4M3)

    def gradient_rows(self, gradient: Tensor) -> Scaled:
        return self._cast("output gradient", gradient, 1, E5M2, self.outputs)

    def gradient_columns(self, gradient: Tensor) -> Scaled:
        return self._cast("output gradient", gradient, 0, E5M2, None)

    def _cast(self, what: str, x: Tensor, dim: int, dtype: torch.dtype, group: Group) -> Scaled:
        """In 8 bits, scaled by what is largest along `dim` among the ranks of a group; or of all of it."""
        amax = largest(x, dim if self.rowwise else None, group)
        self._note(what, amax)
        return cast(x, scale_for(amax, dtype), dtype)

    def _note(self, what: str, amax: Tensor) -> None:
        amax = amax.max()  # (always the same operations: selective recomputation counts them)
        self.seen[what] = torch.maximum(self.seen.get(what, amax), amax)


class _Product(torch.autograd.Function):
    """x [tokens, in], weight [out, in] -> [tokens, out]; x as `used` now, and as `kept` for later."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        layer: Fp8Product,
        used: Tensor,
        used_scale: Tensor,
        kept: Tensor,
        kept_scale: Tensor,
    ) -> Tensor:
        ctx.layer, ctx.gradient_scale = layer, None
        ctx.save_for_backward(weight, kept, kept_scale)
        return product(Scaled(used, used_scale), layer.weight_rows(weight).turned())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        layer, gradient = ctx.layer, grads[0]
        weight, *kept = ctx.saved_tensors  # once: recomputation gives each kept tensor a single time
        wants_x, wants_weight = is_wanted(ctx, 0), is_wanted(ctx, 1)
        rows = columns = None
        if not layer.rowwise:
            # A schedule that cuts backward comes twice with one gradient: its scale is found the first time.
            found = None if wants_x else ctx.gradient_scale
            rows = layer.gradient_rows(gradient) if found is None else cast(gradient, found, E5M2)
            columns, ctx.gradient_scale = rows, rows.scale
        of_x = of_weight = None
        if wants_x:
            of_x = product(rows or layer.gradient_rows(gradient), layer.weight_columns(weight))
        if wants_weight:
            of_columns = columns or layer.gradient_columns(gradient)
            of_weight = product(of_columns.turned(), Scaled(*kept))
        return of_x, of_weight, None, None, None, None, None
