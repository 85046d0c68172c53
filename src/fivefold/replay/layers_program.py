"""Layers that several parts of the model are made of, on tensors that have only a size: see `program`."""

from collections.abc import Callable, Sequence

from fivefold.ledger.fp8 import NARROW
from fivefold.ledger.setup import Number
from fivefold.replay.graph import Tensor
from fivefold.replay.operations import Casts, Operations
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


def in_8_bits(
    t: Operations,
    sizes: Sizes,
    x: Tensor,
    *readers: str,
    told: Sequence[Number] = (),
    columns: Number | None = None,
) -> dict[str, Casts]:
    """The casts of an input, by those of the layers that take it in 8 bits; `told` as in `Casts`.

    columns  how many it has; by default as many as all tokens have together
    """
    taking = [what for what in readers if sizes.in_fp8(what)]
    columns = (x.elements // sizes.tokens if columns is None else columns) if sizes.rowwise else 1
    return dict.fromkeys(taking, Casts(t, x, len(taking), columns, told))


def linear(
    t: Operations,
    x: Tensor,
    weight: Tensor,
    outputs: Number,
    bias: Tensor | None = None,
    turned_gradient: bool = False,
    casts: Casts | None = None,
) -> Tensor:
    """In 8 bits, if there are casts of its input."""
    if casts is None:
        return t.linear(x, weight, outputs, bias, turned_gradient)
    return t.linear_in_8_bits(x, casts, weight, outputs, bias, turned_gradient)


def weight_of(t: Operations, sizes: Sizes, elements: Number, casts: Casts | None, gathered: bool) -> Tensor:
    """Of a linear layer, which takes it in 8 bits if it has casts of its input.

    gathered  such weights come in 8 bits
    """
    return t.parameter(elements, NARROW if casts is not None and gathered else sizes.width)


def column(
    t: Operations,
    sizes: Sizes,
    x: Tensor,
    outputs: Number,
    bias: bool,
    held: Number | None = None,
    casts: Casts | None = None,
) -> Tensor:
    """A linear layer of which each tp rank computes some outputs.

    held   where every rank holds the whole matrix: how many outputs that has
    casts  of its input, where it computes in 8 bits
    """
    weight = weight_of(t, sizes, (held or outputs) * sizes.spec.dim, casts, sizes.gathers_blocks)
    added = t.parameter(held or outputs, sizes.width) if bias else None
    if held is not None:
        weight = t.rows_of(weight, outputs * sizes.spec.dim)
        added = t.rows_of(added, outputs) if added is not None else None
    return linear(t, x, weight, sizes.tokens * outputs, added, casts=casts)


def row(
    t: Operations, sizes: Sizes, x: Tensor, inputs: Number, bias: bool, leaves: bool = True, what: str = ""
) -> Tensor:
    """A linear layer whose result goes to the stream; under tp each rank has some of its inputs."""
    told = (sizes.tokens, sizes.spec.dim) if sizes.rowwise else (1,)
    casts = in_8_bits(t, sizes, x, what, told=told if sizes.several_tp else ()).get(what)
    weight = weight_of(t, sizes, inputs * sizes.spec.dim, casts, sizes.gathers_blocks)
    added = t.parameter(sizes.spec.dim, sizes.width) if bias else None
    if not (leaves and sizes.several_tp):
        return linear(t, x, weight, sizes.whole, added, casts=casts)
    turned = sizes.turned_stream
    left = leave(t, sizes, linear(t, x, weight, sizes.whole, turned_gradient=turned, casts=casts))
    return left if added is None else t.add(left, added, own_gradient=True)


def mlp(t: Operations, sizes: Sizes, x: Tensor, ffn: int, leaves: bool = True, name: str = "mlp") -> Tensor:
    """Under tp, `leaves` says whether its result goes to the stream, or is summed later."""
    width, bias = ffn // sizes.tp, sizes.spec.mlp_bias
    casts = in_8_bits(
        t, sizes, x, *(f"{name}.{one}" for one in (("gate", "up") if sizes.spec.gated else ("up",)))
    )

    def entrance(x: Tensor, which: str) -> Tensor:
        return column(t, sizes, x, width, bias, casts=casts.get(f"{name}.{which}"))

    hidden = activated(t, sizes, x, entrance)
    return row(t, sizes, hidden, width, bias, leaves, what=f"{name}.down")


def activated(t: Operations, sizes: Sizes, x: Tensor, entrance: Callable[[Tensor, str], Tensor]) -> Tensor:
    """What a feed-forward layer makes between its matrices: the first of them is "up"; "gate" is one too."""
    if sizes.spec.gated:
        return t.multiply(t.unary(entrance(x, "gate")), entrance(x, "up"))
    return t.unary(entrance(x, "up"))
