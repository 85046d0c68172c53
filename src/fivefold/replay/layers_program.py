"""Layers that several parts of the model are made of, on tensors that have only a size: see `program`."""

from collections.abc import Callable
from functools import partial

from fivefold.ledger.setup import Number
from fivefold.replay.graph import Tensor
from fivefold.replay.operations import Operations
from fivefold.replay.shared_program import enter, leave
from fivefold.replay.sizes import Sizes


def stream_norm(t: Operations, sizes: Sizes, x: Tensor) -> Tensor:
    """A norm of the residual stream; under tp its result enters a layer that the ranks compute together."""
    normed = _norm(t, sizes, x, sizes.spec.dim, sizes.spec.norm)
    return enter(t, sizes, normed) if sizes.several_tp else normed


def norm_after(t: Operations, sizes: Sizes, x: Tensor) -> Tensor:
    """Of what a layer adds to the stream, where the model has such norms."""
    return _norm(t, sizes, x, sizes.spec.dim, sizes.spec.norm) if sizes.spec.norm_after else x


def head_norm(t: Operations, sizes: Sizes, x: Tensor) -> Tensor:
    """Of each head of queries or keys."""
    return _norm(t, sizes, x, sizes.spec.head_dim, "rmsnorm")


def _norm(t: Operations, sizes: Sizes, x: Tensor, length: int, kind: str) -> Tensor:
    rms, wide = kind == "rmsnorm", sizes.wide
    weights = [t.parameter(length, sizes.width) for _ in range(1 if rms or not sizes.spec.norm_bias else 2)]
    if not sizes.spec.norm_unit_offset:
        return t.norm(x, weights, length, rms)
    return t.cast(t.norm(t.cast(x, wide), [t.times(t.cast(weights[0], wide))], length, rms), x.width)


def column(
    t: Operations, sizes: Sizes, x: Tensor, outputs: Number, bias: bool, held: Number | None = None
) -> Tensor:
    """A linear layer of which each tp rank computes some outputs.

    held  where every rank holds the whole matrix: how many outputs that has
    """
    weight = t.parameter((held or outputs) * sizes.spec.dim, sizes.width)
    added = t.parameter(held or outputs, sizes.width) if bias else None
    if held is not None:
        weight = t.rows_of(weight, outputs * sizes.spec.dim)
        added = t.rows_of(added, outputs) if added is not None else None
    return t.linear(x, weight, sizes.tokens * outputs, added)


def row(t: Operations, sizes: Sizes, x: Tensor, inputs: Number, bias: bool, leaves: bool = True) -> Tensor:
    """A linear layer whose result goes to the stream; under tp each rank has some of its inputs."""
    weight = t.parameter(inputs * sizes.spec.dim, sizes.width)
    added = t.parameter(sizes.spec.dim, sizes.width) if bias else None
    if not (leaves and sizes.several_tp):
        return t.linear(x, weight, sizes.whole, added)
    left = leave(t, sizes, t.linear(x, weight, sizes.whole, turned_gradient=sizes.turned_stream))
    return left if added is None else t.add(left, added, own_gradient=True)


def mlp(t: Operations, sizes: Sizes, x: Tensor, ffn: int, leaves: bool = True) -> Tensor:
    """Under tp, `leaves` says whether its result goes to the stream, or is summed later."""
    width, bias = ffn // sizes.tp, sizes.spec.mlp_bias
    hidden = activated(t, sizes, x, partial(column, t, sizes, outputs=width, bias=bias))
    return row(t, sizes, hidden, width, bias, leaves)


def activated(t: Operations, sizes: Sizes, x: Tensor, up: Callable[[Tensor], Tensor]) -> Tensor:
    """What a feed-forward layer makes between its matrices, of which `up` is the first; a gate is one too."""
    if sizes.spec.gated:
        return t.multiply(t.unary(up(x)), up(x))
    return t.unary(up(x))
