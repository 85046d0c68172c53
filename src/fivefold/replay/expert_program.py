"""The mixture of experts on tensors that have only a size: see `program`.

The counterpart of `models/moe.py`, `models/grouped.py` and `axes/runtime/expert_split.py`. Tokens are taken
to be dealt evenly: each rank gets as many as it sends.

What an autograd function keeps as an attribute, not as a saved tensor, lives as long as the graph does: here
it is what a `backward` function refers to.
"""

from fivefold.ledger.setup import Number
from fivefold.replay.graph import Gradients, Tensor
from fivefold.replay.layers_program import Layer, Mlp, Parameters
from fivefold.replay.operations import INTEGER
from fivefold.replay.segments import Saved


class Router:
    """Scores in float32 or wider."""

    def __init__(self, make: Parameters):
        self.t, self.sizes = make.t, make.sizes
        self.weight = make(self.sizes.experts * self.sizes.spec.dim)

    def __call__(self, x: Tensor) -> Tensor:
        t, wide = self.t, self.sizes.wide
        return t.linear(t.cast(x, wide), t.cast(self.weight, wide), self.sizes.tokens * self.sizes.experts)


class StackedLinear:
    """One linear layer an expert."""

    def __init__(self, make: Parameters, into: Number, out: Number):
        self.t, self.into, self.out = make.t, into, out
        held = make.sizes.held_experts
        self.weight = make(held * into * out)
        self.bias = make.maybe(make.sizes.spec.mlp_bias, held * out)

    def __call__(self, rows: Tensor) -> Tensor:
        t, looped = self.t, self.t.device == "cpu"
        # Without a kernel for it: one product for each expert, of parts that are put together after.
        flat = t.view(rows, copied_back=looped)
        weight = t.view(self.weight, copied_back=looped)
        saved = t.save(flat, weight)
        result = t.costly(rows.elements // self.into * self.out, rows.width)
        result = t.record(result, [flat, weight, self.bias], saved=saved)
        return t.contiguous(result) if looped else result


class Experts(Mlp):
    """Feed-forward layers of one shape, stacked."""

    def __init__(self, make: Parameters):
        spec, width = make.sizes.spec, make.sizes.spec.ffn // make.sizes.tp
        self.t = make.t
        self.gate = StackedLinear(make, spec.dim, width) if spec.gated else None
        self.up = StackedLinear(make, spec.dim, width)
        self.down = StackedLinear(make, width, spec.dim)


class Moe:
    def __init__(self, make: Parameters, shared: Layer | None):
        self.t, self.sizes, self.shared = make.t, make.sizes, shared
        self.router = Router(make)
        self.experts: Layer = Experts(make)

    def __call__(self, x: Tensor) -> Tensor:
        t, sizes = self.t, self.sizes
        per_token, chosen_count = sizes.per_token, sizes.tokens * sizes.per_token
        probabilities = self._softmax(self.router(x))
        chosen = t.empty(sizes.tokens // sizes.rows * per_token, INTEGER)
        gates = self._divided(self._picked(probabilities, chosen, chosen_count))
        order, place = self._sorted(chosen_count)
        counts = t.empty(sizes.rows * sizes.experts, INTEGER)
        t.empty(chosen_count, INTEGER)  # ones, which are added up
        rows = self._repeated(x, place)
        rows = self._dispatched(rows)
        rows = self._permuted(rows, order)
        mixed = t.cast(self._weighted(rows, gates), x.width)
        if self.shared is not None:
            mixed = t.add(mixed, self.shared(x))
        return self._balanced(mixed, probabilities, counts)

    def _softmax(self, scores: Tensor) -> Tensor:
        result = self.t.like(scores)
        return self.t.record(result, [scores], saved=self.t.save(result))

    def _picked(self, probabilities: Tensor, chosen: Tensor, count: Number) -> Tensor:
        t = self.t
        saved = t.save(chosen)
        size = probabilities.elements, probabilities.width

        def backward(g: list[Tensor], saved: Saved) -> Gradients:
            saved[0]
            zeros = t.empty(*size)
            return [t.like(zeros)]

        return t.record(t.empty(count, probabilities.width), [probabilities], backward, saved)

    def _divided(self, gates: Tensor) -> Tensor:
        """By their sum over a token's experts."""
        t = self.t
        total = t.summed(gates, self.sizes.tokens)
        saved = t.save(gates, total)

        def backward(g: list[Tensor], saved: Saved) -> Gradients:
            of_gates = t.like(saved[0])
            quotient = t.like(of_gates)
            minus = t.like(of_gates)
            product = t.like(of_gates)
            del quotient, minus
            return [of_gates, t.empty(saved[1].elements, product.width)]

        return t.record(t.like(gates), [gates, total], backward, saved)

    def _sorted(self, count: Number) -> tuple[Tensor, Tensor]:
        """The order of rows by expert, and its inverse."""
        flat = self.t.empty(count, INTEGER)
        values, order = self.t.like(flat), self.t.like(flat)
        del flat, values
        place, numbers = self.t.like(order), self.t.like(order)
        del numbers
        return order, place

    def _repeated(self, x: Tensor, place: Tensor) -> Tensor:
        """Each token as often as it has experts, sorted by expert."""
        t, tokens, width = self.t, x.elements, x.width
        x = t.view(x)
        divided = t.like(place)
        result = t.empty(tokens * self.sizes.per_token, width)
        del divided

        def backward(g: list[Tensor], _: Saved, place: Tensor = place) -> Gradients:
            back = t.like(g[0])
            return [t.empty(tokens, back.width)]

        return t.record(result, [x], backward)

    def _permuted(self, rows: Tensor, inverse: Tensor) -> Tensor:
        t = self.t

        def backward(g: list[Tensor], _: Saved, inverse: Tensor = inverse) -> Gradients:
            return [t.like(g[0])]

        return t.view(t.record(t.like(rows), [rows], backward))

    def _dispatched(self, rows: Tensor) -> Tensor:
        """To the ranks that hold the experts, and back."""
        if not self.sizes.several_ep:
            return self.experts(rows)
        count = rows.elements // self.sizes.spec.dim
        rows = self._exchanged(rows)
        order, place = self._sorted(count)
        rows = self.experts(self._permuted(rows, place))
        return self._exchanged(self._permuted(rows, order))

    def _exchanged(self, rows: Tensor) -> Tensor:
        return self.t.record(self.t.costly(rows.elements, rows.width), [rows])

    def _weighted(self, rows: Tensor, gates: Tensor) -> Tensor:
        """Rows times their gates, in the gates' dtype; then summed over a token's experts."""
        t = self.t
        saved = t.save(rows, gates)
        product = t.empty(rows.elements, gates.width)
        width, count = rows.width, gates.elements

        def backward(g: list[Tensor], saved: Saved) -> Gradients:
            spread = t.empty(saved[0].elements, saved[1].width)
            of_rows = t.cast(t.like(spread), width)
            return [of_rows, t.empty(count, spread.width)]

        product = t.record(product, [rows, gates], backward, saved)
        return t.summed(product, self.sizes.whole)

    def _balanced(self, x: Tensor, probabilities: Tensor, counts: Tensor) -> Tensor:
        t, width = self.t, probabilities.width
        size = self.sizes.tokens * self.sizes.experts

        def backward(g: list[Tensor], _: Saved, counts: Tensor = counts) -> Gradients:
            slope = t.empty(counts.elements, width)
            return [g[0].detached(), Tensor(slope.storage, size, width)]

        return t.record(x.detached(), [x, probabilities], backward)


def mixture(make: Parameters) -> Layer:
    """Routed experts, and a shared one; under tp what they add leaves for the stream once."""
    spec, stream = make.sizes.spec, make.stream
    shared: Layer | None = None
    if spec.shared_experts:
        shared = Mlp(make, spec.shared_experts * spec.ffn, leaves=False)
    moe = Moe(make, shared)
    return moe if stream is None else lambda x: stream.leave(moe(x))
