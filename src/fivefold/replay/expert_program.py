"""The mixture of experts on tensors that have only a size: see `program`.

The counterpart of `models/moe.py`, `models/grouped.py`, `axes/runtime/expert_split.py` and
`axes/runtime/fp8_grouped.py`. Tokens are taken to be dealt evenly: each rank gets as many as it sends.

What an autograd function keeps as an attribute, not as a saved tensor, lives as long as the graph does: here
it is what a `backward` function refers to.
"""

from fivefold.ledger.setup import Number
from fivefold.replay.graph import Gradients, Tensor
from fivefold.replay.layers_program import activated, in_8_bits, mlp
from fivefold.replay.operations import INTEGER, Casts, Operations
from fivefold.replay.shared_program import leave
from fivefold.replay.sizes import Sizes


def mixture(t: Operations, sizes: Sizes, x: Tensor) -> Tensor:
    """Routed experts, and a shared one; under tp what they add leaves for the stream once."""
    return leave(t, sizes, _moe(t, sizes, x)) if sizes.several_tp else _moe(t, sizes, x)


def _moe(t: Operations, sizes: Sizes, x: Tensor) -> Tensor:
    spec, per_token, chosen_count = sizes.spec, sizes.per_token, sizes.tokens * sizes.per_token
    probabilities = _softmax(t, _scores(t, sizes, x))
    chosen = t.empty(sizes.tokens // sizes.rows * per_token, INTEGER)
    gates = _divided(t, sizes, _picked(t, probabilities, chosen, chosen_count))
    order, place = _sorted(t, chosen_count)
    counts = t.empty(sizes.rows * sizes.experts, INTEGER)
    t.empty(chosen_count, INTEGER)  # ones, which are added up
    rows = _repeated(t, sizes, x, place)
    rows = _dispatched(t, sizes, rows)
    rows = _permuted(t, rows, order)
    mixed = t.cast(_weighted(t, sizes, rows, gates), x.width)
    if spec.shared_experts:
        shared = spec.shared_experts * spec.ffn
        mixed = t.add(mixed, mlp(t, sizes, x, shared, leaves=False, name="mlp.shared"))
    return _balanced(t, sizes, mixed, probabilities, counts)


# --- the router --------------------------------------------------------------------------------------------


def _scores(t: Operations, sizes: Sizes, x: Tensor) -> Tensor:
    """In float32 or wider."""
    weight, wide = t.parameter(sizes.experts * sizes.spec.dim, sizes.width), sizes.wide
    return t.linear(t.cast(x, wide), t.cast(weight, wide), sizes.tokens * sizes.experts)


def _softmax(t: Operations, scores: Tensor) -> Tensor:
    result = t.like(scores)
    return t.record(result, [scores], saved=t.save(result))


def _picked(t: Operations, probabilities: Tensor, chosen: Tensor, count: Number) -> Tensor:
    saved = t.save(chosen)
    size = probabilities.elements, probabilities.width

    def backward(g: Tensor) -> Gradients:
        zeros = t.empty(*size)
        return [t.like(zeros)]

    return t.record(t.empty(count, probabilities.width), [probabilities], backward, saved)


def _divided(t: Operations, sizes: Sizes, gates: Tensor) -> Tensor:
    """By their sum over a token's experts."""
    total = t.summed(gates, sizes.tokens)
    saved = t.save(gates, total)

    def backward(g: Tensor) -> Gradients:
        of_gates = t.like(g)
        quotient = t.like(of_gates)
        minus = t.like(of_gates)
        product = t.like(of_gates)
        del quotient, minus
        return [of_gates, t.empty(sizes.tokens, product.width)]

    return t.record(t.like(gates), [gates, total], backward, saved)


def _balanced(t: Operations, sizes: Sizes, x: Tensor, probabilities: Tensor, counts: Tensor) -> Tensor:
    width = probabilities.width

    def backward(g: Tensor, counts: Tensor = counts) -> Gradients:
        slope = t.empty(counts.elements, width)
        return [g.detached(), Tensor(slope.storage, sizes.tokens * sizes.experts, width)]

    return t.record(x.detached(), [x, probabilities], backward)


# --- rows, one for each token and expert -------------------------------------------------------------------


def _sorted(t: Operations, count: Number) -> tuple[Tensor, Tensor]:
    """The order of rows by expert, and its inverse."""
    flat = t.empty(count, INTEGER)
    values, order = t.like(flat), t.like(flat)
    del flat, values
    place, numbers = t.like(order), t.like(order)
    del numbers
    return order, place


def _repeated(t: Operations, sizes: Sizes, x: Tensor, place: Tensor) -> Tensor:
    """Each token as often as it has experts, sorted by expert."""
    tokens = x.elements
    x = t.view(x)
    divided = t.like(place)
    result = t.empty(tokens * sizes.per_token, x.width)
    del divided

    def backward(g: Tensor, place: Tensor = place) -> Gradients:
        back = t.like(g)
        return [t.empty(tokens, back.width)]

    return t.record(result, [x], backward)


def _permuted(t: Operations, rows: Tensor, inverse: Tensor) -> Tensor:
    def backward(g: Tensor, inverse: Tensor = inverse) -> Gradients:
        return [t.like(g)]

    return t.view(t.record(t.like(rows), [rows], backward))


def _dispatched(t: Operations, sizes: Sizes, rows: Tensor) -> Tensor:
    """To the ranks that hold the experts, and back."""
    if not sizes.several_ep:
        return _experts(t, sizes, rows)
    count = rows.elements // sizes.spec.dim
    rows = _exchanged(t, rows)
    order, place = _sorted(t, count)
    rows = _experts(t, sizes, _permuted(t, rows, place))
    return _exchanged(t, _permuted(t, rows, order))


def _exchanged(t: Operations, rows: Tensor) -> Tensor:
    return t.record(t.costly(rows.elements, rows.width), [rows])


def _weighted(t: Operations, sizes: Sizes, rows: Tensor, gates: Tensor) -> Tensor:
    """Rows times their gates, in the gates' dtype; then summed over a token's experts."""
    saved = t.save(rows, gates)
    width, count = rows.width, gates.elements

    def backward(g: Tensor) -> Gradients:
        spread = t.like(g)
        of_rows = t.cast(t.like(spread), width)
        return [of_rows, t.empty(count, spread.width)]

    product = t.record(t.empty(rows.elements, gates.width), [rows, gates], backward, saved)
    return t.summed(product, sizes.whole)


# --- the experts -------------------------------------------------------------------------------------------


def _experts(t: Operations, sizes: Sizes, rows: Tensor) -> Tensor:
    """Feed-forward layers of one shape, stacked."""
    dim, width, held = sizes.spec.dim, sizes.spec.ffn // sizes.tp, sizes.held_experts
    entrances = [f"mlp.experts.{one}" for one in (("gate", "up") if sizes.spec.gated else ("up",))]
    casts = in_8_bits(t, sizes, rows, *entrances, columns=held * dim)

    def entrance(rows: Tensor, which: str) -> Tensor:
        return _stacked_linear(t, sizes, rows, dim, width, casts.get(f"mlp.experts.{which}"))

    hidden = activated(t, sizes, rows, entrance)
    told = (hidden.elements // width, held * dim) if sizes.rowwise else (1,)
    told_by_tp = told if sizes.several_tp else ()
    casts = in_8_bits(t, sizes, hidden, "mlp.experts.down", told=told_by_tp, columns=held * width)
    return _stacked_linear(t, sizes, hidden, width, dim, casts.get("mlp.experts.down"))


def _stacked_linear(
    t: Operations, sizes: Sizes, rows: Tensor, into: Number, out: Number, casts: Casts | None
) -> Tensor:
    """One linear layer an expert; in 8 bits, if there are casts of its input."""
    held, looped = sizes.held_experts, t.device == "cpu"
    stacked = t.parameter(held * into * out, sizes.width)
    bias = t.parameter(held * out, sizes.width) if sizes.spec.mlp_bias else None
    if casts is not None:
        return t.linear_in_8_bits(rows, casts, stacked, rows.elements // into * out, bias)
    # Without a kernel for it: one product for each expert, of parts that are put together after.
    flat = t.view(rows, copied_back=looped)
    weight = t.view(stacked, copied_back=looped)
    saved = t.save(flat, weight)
    result = t.costly(rows.elements // into * out, rows.width)
    result = t.record(result, [flat, weight, bias], saved=saved)
    return t.contiguous(result) if looped else result
