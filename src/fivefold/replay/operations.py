"""The operations a model is made of, as a tape plays them: what each allocates, saves and does backward.

Sizes are in elements. Where CPU and GPU kernels differ in what they keep, `Operations.device` says which.
"""

from __future__ import annotations

from fivefold.ledger.setup import Number
from fivefold.replay.graph import Tensor
from fivefold.replay.segments import Saved
from fivefold.replay.tape import Tape

WIDE = 4
"""Bytes of a float32: what norms, rotations and losses are computed in, unless the model is wider."""
INTEGER = 8

Gradients = list[Tensor | None]


class Operations(Tape):
    """A tape with torch's operations on it."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device

    def owed(self, argument: int, elements: Number, width: int) -> Tensor | None:
        """The gradient of an argument, in a backward function; None where this pass does not ask for it."""
        return self.empty(elements, width) if self.wanted[argument] else None

    # --- views and copies ------------------------------------------------------------------------------

    def view(self, x: Tensor, copied_back: bool = False) -> Tensor:
        """The same memory, seen in another shape; `copied_back`: its gradient lies in another order."""
        result = x.detached()
        self.record(result, [x], lambda g, _: [self.like(g[0]) if copied_back else g[0].detached()])
        return result

    def contiguous(self, x: Tensor) -> Tensor:
        """A copy in another order; the gradient needs none."""
        result = self.like(x)
        self.record(result, [x], lambda g, _: [g[0].detached()])
        return result

    def cast(self, x: Tensor, width: int) -> Tensor:
        if x.width == width:
            return x
        result = x.storage.tape.empty(x.elements, width)
        back = x.width
        self.record(result, [x], lambda g, _: [self.empty(g[0].elements, back)])
        return result

    def rows_of(self, weight: Tensor, elements: Number) -> Tensor:
        """Some rows of a parameter; the gradient is as large as all of it."""
        result = Tensor(weight.storage, elements, weight.width)
        size = weight.elements, weight.width
        self.record(result, [weight], lambda g, _: [self.empty(*size)])
        return result

    def halves(self, x: Tensor) -> list[Tensor]:
        """Two views of half of `x` each."""
        return self.parts(x, [x.elements // 2] * 2)

    def joined(self, *tensors: Tensor) -> Tensor:
        """All of them one after the other; gradients are views."""
        sizes = [tensor.elements for tensor in tensors]
        result = self.empty(sum(sizes), tensors[0].width)

        def backward(g: list[Tensor], _: Saved) -> Gradients:
            return [Tensor(g[0].storage, size, g[0].width) for size in sizes]

        self.record(result, tensors, backward)
        return result

    def parts(self, x: Tensor, sizes: list[Number]) -> list[Tensor]:
        """Views of `x`, one after the other; their gradients are put together again."""
        views = [Tensor(x.storage, size, x.width) for size in sizes]
        whole = x.elements
        self.record(views, [x], lambda g, _: [self.empty(whole, g[0].width)])
        return views

    def repeated(self, x: Tensor, elements: Number) -> Tensor:
        """Each head several times."""
        result = self.empty(elements, x.width)
        size = x.elements
        self.record(result, [x], lambda g, _: [self.empty(size, g[0].width)])
        return result

    # --- element by element ----------------------------------------------------------------------------

    def add(self, first: Tensor, second: Tensor) -> Tensor:
        result = self.like(first)
        self.record(result, [first, second], lambda g, _: [g[0].detached(), g[0].detached()])
        return result

    def subtract(self, first: Tensor, second: Tensor) -> Tensor:
        result = self.like(first)
        self.record(result, [first, second], lambda g, _: [g[0].detached(), self.like(g[0])])
        return result

    def add_repeated(self, x: Tensor, other: Tensor) -> Tensor:
        """`x` plus something smaller that is repeated."""
        result = self.like(x)
        size = other.elements, other.width
        self.record(result, [x, other], lambda g, _: [g[0].detached(), self.empty(*size)])
        return result

    def multiply(self, x: Tensor, other: Tensor) -> Tensor:
        """Two tensors of one shape."""
        saved = self.save(x if other.needs_gradient else None, other if x.needs_gradient else None)
        result = self.like(x)

        def backward(g: list[Tensor], saved: Saved) -> Gradients:
            of_x = self.like(saved[1]) if saved.has(1) else None
            of_other = self.like(saved[0]) if saved.has(0) else None
            return [of_x, of_other]

        self.record(result, [x, other], backward, saved)
        return result

    def scale(self, x: Tensor, factor: Tensor) -> Tensor:
        """`x` times something smaller that is repeated, of which a gradient may be wanted too."""
        saved = self.save(x if factor.needs_gradient else None, factor)
        result = self.like(x)
        elements, width, wanted = factor.elements, factor.width, factor.needs_gradient

        def backward(g: list[Tensor], saved: Saved) -> Gradients:
            saved[1]
            spread = self.like(saved[0]) if wanted else None
            of_x = self.like(g[0])
            of_factor = None
            if spread is not None:
                of_factor = self.cast(self.empty(elements, spread.width), width)
            return [of_x, of_factor]

        self.record(result, [x, factor], backward, saved)
        return result

    def unary(self, x: Tensor) -> Tensor:
        """An activation such as silu or gelu: keeps its argument."""
        saved = self.save(x)
        result = self.like(x)
        self.record(result, [x], lambda g, saved: [self.like(saved[0])], saved)
        return result

    # --- products --------------------------------------------------------------------------------------

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        outputs: Number,
        bias: Tensor | None = None,
        turned_gradient: bool = False,
    ) -> Tensor:
        """x [rows, in] times a weight [out, in], transposed; `outputs` = rows x out."""
        if bias is None:
            turned, flat = self.view(weight), self.view(x)
        else:  # the way with a bias takes them up in the other order, and differentiates them so
            flat, turned = self.view(x), self.view(weight)
        saved = self.save(flat, turned)
        result = self.costly(outputs, x.width)
        inputs, parameters = x.elements, weight.elements
        extra = None if bias is None else bias.elements

        def backward(g: list[Tensor], saved: Saved) -> Gradients:
            saved[0], saved[1]
            width = g[0].width
            if extra is None:
                of_weight = self.owed(1, parameters, width)
                return [self.owed(0, inputs, width), of_weight, None]
            of_x = self.owed(0, inputs, width)
            return [of_x, self.owed(1, parameters, width), self.owed(2, extra, width)]

        self.record(result, [flat, turned, bias], backward, saved)
        return self.view(result, copied_back=turned_gradient)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, rows: Number) -> Tensor:
        """Flash attention; `rows` = queries x heads, each with a log-sum-exp."""
        saved_inputs = self.save(query, key, value)
        result, weight = self.costly(query.elements, query.width), self.costly(rows, max(WIDE, query.width))
        saved = self.save(result, weight)

        def backward(g: list[Tensor], saved: Saved) -> Gradients:
            return [self.like(saved[i]) for i in range(3)]

        self.record(result, [query, key, value], backward, saved_inputs + saved)
        return result

    # --- norms -----------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, rows: Number) -> Tensor:
        return (
            self._rms_by_parts(x, weight, rows) if self.device == "cpu" else self._norm(x, [weight], [rows])
        )

    def layer_norm(self, x: Tensor, parameters: list[Tensor], rows: Number) -> Tensor:
        return self._norm(x, parameters, [rows, rows])

    def _norm(self, x: Tensor, parameters: list[Tensor], statistics: list[Number]) -> Tensor:
        inputs = self.save(x, parameters[0])
        result = self.like(x)
        width = x.width if self.device == "cpu" else max(WIDE, x.width)
        kept = [self.empty(rows, width) for rows in statistics]
        saved = self.save(*kept)
        sizes = [(p.elements, p.width) for p in parameters]

        def backward(g: list[Tensor], saved: Saved) -> Gradients:
            saved[0]
            return [self.like(g[0]), *(self.empty(*size) for size in sizes)]

        self.record(result, [x, *parameters], backward, inputs + saved)
        return result

    def _rms_by_parts(self, x: Tensor, weight: Tensor, rows: Number) -> Tensor:
        """On a CPU the norm is put together from smaller operations, and keeps two copies of its input."""
        width = x.width
        wide = self.cast(x, max(WIDE, x.width))
        inverse = self._inverse_root_mean_square(wide, rows)
        normed = self.scale(wide, inverse)
        del inverse, wide
        return self.cast(self.scale(normed, weight), width)

    def _inverse_root_mean_square(self, x: Tensor, rows: Number) -> Tensor:
        squares = self._square(x)
        mean = self.empty(rows, x.width)
        elements = x.elements
        self.record(mean, [squares], lambda g, _: [self.empty(elements, g[0].width)])
        del squares
        root = self.empty(rows, x.width)
        saved = self.save(root)

        def backward(g: list[Tensor], saved: Saved) -> Gradients:
            cube = self.like(saved[0])
            half = self.like(cube)
            return [self.like(half)]

        self.record(root, [mean], backward, saved)
        return root

    def _square(self, x: Tensor) -> Tensor:
        saved = self.save(x)
        result = self.like(x)

        def backward(g: list[Tensor], saved: Saved) -> Gradients:
            power = self.like(saved[0])
            twice = self.like(power)
            return [self.like(twice)]

        self.record(result, [x], backward, saved)
        return result

    # --- the ends --------------------------------------------------------------------------------------

    def embedding(self, weight: Tensor, tokens: Tensor, elements: Number) -> Tensor:
        saved = self.save(tokens)
        result = self.empty(elements, weight.width)
        size = weight.elements, weight.width

        def backward(g: list[Tensor], saved: Saved) -> Gradients:
            saved[0]
            return [self.empty(*size)]

        self.record(result, [weight], backward, saved)
        return result

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Summed over tokens, of logits that are wide already."""
        flat = self.view(logits)
        result = self.like(flat)
        kept = self.save(result)
        self.record(result, [flat], lambda g, saved: [self.like(saved[0])], kept)
        also = self.save(result, targets)
        total, weight = self.empty(1, logits.width), self.empty(1, logits.width)
        also = also + self.save(weight)
        self.record(total, [result], lambda g, saved: [self.like(saved[0])], also)
        return total
