"""Blocks whose tp messages travel while their matrix products are computed (`communication.tp_overlap`).

    forward    stream  norm,  gather + product with query, key, value (or gate, up)
               ...            product with output (or down) + reduce-scatter            stream
    backward   the same two operations, exchanged: the derivative of each is the other

Torch's operators on symmetric memory compute with one rank's part while the next one's is on its way.

A norm then hands on not all tokens, but what every layer that reads it makes of them; the layers look theirs
up. What was gathered is kept for the weights' gradients. Embedding, head and experts are as ever.

In this file tensors have the sequence first, [S, B, ...]: a rank's tokens then lie together in memory.
"""

from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.axes.runtime.tensor_layers import LocalLayer
from fivefold.comm.collectives import gathered, scattered
from fivefold.comm.compat import fused_gather_matmul, fused_matmul_scatter, group_named, is_wanted
from fivefold.models.decoder import Block
from fivefold.models.mlp import Mlp
from fivefold.operators import operator


def overlap_messages(block: Block, group: str) -> None:
    """Change a block that is one tp rank's part already, and shares the stream along the sequence.

    Not the entrance of experts: who gets a token is worked out from the token itself. In a parallel block
    attention enters with them.
    """
    attention, mlp = block.attention, block.mlp
    entrances: dict[Any, list[nn.Module]] = {
        block.attention_norm: [attention.query, attention.key, attention.value]
    }
    exits: list[nn.Module] = [attention.output]
    if isinstance(mlp, Mlp):
        readers = entrances.setdefault(block.mlp_norm or block.attention_norm, [])
        readers += [layer for layer in (mlp.gate, mlp.up) if layer is not None]
        exits.append(mlp.down)
    elif block.mlp_norm is None:
        entrances.clear()
    for norm, columns in entrances.items():
        # It returns what each column makes of all tokens, and itself stays with this rank's.
        norm.then = None
        norm.forward = partial(_entered, norm.forward, columns, group)
        for column in columns:
            column.forward = itemgetter(column)
    for row in exits:
        row.forward = partial(_left, row, group)


# Not compiled: autograd functions here speak with each other, which a compiler does not follow.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _entered(norm: Any, columns: list[LocalLayer], group: str, x: Tensor) -> dict[LocalLayer, Tensor]:
    """x, the stream's part of [B, S, dim] -> what each column makes of all of it, normed: [B, S, its out]."""
    parts = [column.used_parts() for column in columns]
    first = norm(x).transpose(0, 1)
    weights = [weight.detach() for weight, _ in parts]
    whole, *products = _GatherMatmul.apply(first, group, *weights)  # type: ignore[no-untyped-call]
    results = {}
    for column, product, (weight, bias) in zip(columns, products, parts, strict=True):
        result = _WeightOfGathered.apply(product, weight, whole).transpose(0, 1)  # type: ignore[no-untyped-call]
        results[column] = result if bias is None else result + bias
    return results


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _left(row: LocalLayer, group: str, x: Tensor) -> Tensor:
    """x [B, S, this rank's inputs] -> the stream's part of [B, S, out]."""
    weight, bias = row.used_parts()
    first = _WeightOfScattered.apply(x.transpose(0, 1), weight)  # type: ignore[no-untyped-call]
    whole: Tensor = _MatmulScatter.apply(first, group, weight.detach()).transpose(0, 1)  # type: ignore[no-untyped-call]
    return whole if bias is None else whole + bias


class _GatherMatmul(torch.autograd.Function):
    """x [S/tp, B, in], weights [out, in] -> all of x, [S, B, in], and its product with each, [S, B, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, *weights: Tensor) -> Any:
        ctx.group = group
        ctx.save_for_backward(*weights)
        ctx.set_materialize_grads(False)
        whole, *products = gather_matmul(x.contiguous(), [weight.t() for weight in weights], group)
        ctx.mark_non_differentiable(whole)
        return whole, *products

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        used = [(grad, w) for grad, w in zip(grads[1:], ctx.saved_tensors, strict=True) if grad is not None]
        # Side by side, so that the sum over layers is a part of the product, and one message does for all.
        grad = torch.cat([grad for grad, _ in used], dim=-1)
        weight = torch.cat([weight for _, weight in used])
        return matmul_scatter(grad, weight, ctx.group), None, *(None for _ in grads[1:])


class _WeightOfGathered(torch.autograd.Function):
    """Hands on a product [S, B, out] made by `_GatherMatmul`, with its weight's gradient.

    Apart from it, so that a pipeline that computes gradients of weights later does not send anything again.
    """

    @staticmethod
    def forward(ctx: Any, product: Tensor, weight: Tensor, whole: Tensor) -> Tensor:
        ctx.save_for_backward(whole)
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weight_grad = _outer(grads[0], ctx.saved_tensors[0]) if is_wanted(ctx, 1) else None
        return grads[0], weight_grad, None


class _WeightOfScattered(torch.autograd.Function):
    """Hands on x [S, B, in], which `_MatmulScatter` is about to multiply by a weight, with its gradient.

    Apart from it, for the same reason; and before it: recomputation ends where the last tensor is kept that
    backward needs. After a segment's last layer, that would be after one more product and message.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weight_grad = _outer(ctx.whole_grad, ctx.x) if is_wanted(ctx, 1) else None
        return grads[0], weight_grad


class _MatmulScatter(torch.autograd.Function):
    """x [S, B, in], weight [out, in] -> a rank's part of the sum of all ranks' products, [S/tp, B, out].

    x comes from `_WeightOfScattered`, which keeps it and the weight, and gets the gathered gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, weight: Tensor) -> Any:
        ctx.group = group
        return matmul_scatter(x, weight.t(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        keeper = ctx.next_functions[0][0]
        keeper.x, weight = keeper.saved_tensors  # once: recomputation gives each kept tensor a single time
        keeper.whole_grad, x_grad = gather_matmul(grads[0].contiguous(), [weight], ctx.group)
        return x_grad, None, None


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient [out, in] of a weight, from that of its products [S, B, out] and its input [S, B, in]."""
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


# --- as operators ------------------------------------------------------------------------------------------
# Compilers and selective recomputation see each as one. On CPUs, where nothing would be won, it is a message
# and a product, one after the other.


def _like_gathered(x: Tensor, matrices: list[Tensor], group: str) -> list[Tensor]:
    length = x.shape[0] * group_named(group).size()
    widths = [x.shape[-1], *(matrix.shape[1] for matrix in matrices)]
    return [x.new_empty(length, *x.shape[1:-1], width) for width in widths]


@operator(_like_gathered)
def gather_matmul(x: Tensor, matrices: list[Tensor], group: str) -> list[Tensor]:
    """x [S/tp, B, in], matrices [in, out] -> all of x, [S, B, in], and its product with each, [S, B, out]."""
    if x.is_cuda:
        return fused_gather_matmul(x, matrices, group)
    whole = gathered(x, group_named(group))
    return [whole, *(whole @ matrix for matrix in matrices)]


def _like_scattered(x: Tensor, matrix: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // group_named(group).size(), *x.shape[1:-1], matrix.shape[1])


@operator(_like_scattered)
def matmul_scatter(x: Tensor, matrix: Tensor, group: str) -> Tensor:
    """x [S, B, in], matrix [in, out] -> this rank's part of the ranks' products' sum, [S/tp, B, out]."""
    if x.is_cuda:
        return fused_matmul_scatter(x, matrix, group)
    return scattered(x @ matrix, group_named(group))
