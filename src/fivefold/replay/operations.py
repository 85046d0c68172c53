"""The operations a model is made of, as a tape replays them: what each allocates, saves and does backward.

Sizes are in elements. Where CPU and GPU kernels differ in what they keep, `Operations.device` says which.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.ledger.fp8 import NARROW
from fivefold.ledger.setup import Number
from fivefold.replay.graph import Gradients, Tensor
from fivefold.replay.tape import Tape

WIDE = 4
"""Bytes of a float32: what norms, rotations and losses are computed in, unless the model is wider."""
INTEGER = 8


class Casts:
    """An input in 8 bits: made by the first of its readers, and let go by the last.

    columns  how many it has, where each is scaled by itself; 1 where there is one scale for all
    told     sizes of messages about its scales, and those of its reader's weight
    """

    def __init__(
        self,
        t: Operations,
        x: Tensor,
        readers: int,
        columns: Number,
        told: Sequence[Number] = (),
    ):
        self.t, self.elements, self.left, self.told, self.columns = t, x.elements, readers, told, columns
        self.made: tuple[Tensor, Tensor, Tensor] | None = None

    def taken(self) -> tuple[Tensor, Tensor, Tensor]:
        """As forward uses it, and as backward does: by rows, and by columns; and the latter's scales."""
        if self.made is None:
            used, kept = self.t.narrowed(self.elements), self.t.narrowed(self.elements)
            self.made = used, kept, self.t.empty(self.columns, WIDE)
        made, self.left = self.made, self.left - 1
        if self.left == 0:
            self.made = None
        return made


def passed_on(g: Tensor) -> Gradients:
    """Backward of an operation whose argument gets the gradient of its result."""
    return [g.detached()]


class Operations(Tape):
    """A tape with torch's operations on it."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device

    # --- views and copies ------------------------------------------------------------------------------

    def view(self, x: Tensor, copied_back: bool = False) -> Tensor:
        """The same memory, seen in another shape; `copied_back`: its gradient lies in another order."""
        return self.record(x.detached(), [x], None if copied_back else passed_on)

    def contiguous(self, x: Tensor) -> Tensor:
        """A copy in another order; the gradient needs none."""
        return self.record(self.like(x), [x], passed_on)

    def cast(self, x: Tensor, width: int) -> Tensor:
        if x.width == width:
            return x
        return self.record(self.empty(x.elements, width), [x])

    def rows_of(self, weight: Tensor, elements: Number) -> Tensor:
        """Some rows of a parameter; the gradient is as large as all of it."""
        return self.record(Tensor(weight.storage, elements, weight.width), [weight])

    def joined(self, *tensors: Tensor) -> Tensor:
        """All of them one after the other; gradients are views."""
        sizes = [tensor.elements for tensor in tensors]

        def backward(g: Tensor) -> Gradients:
            return [Tensor(g.storage, size, g.width) for size in sizes]

        return self.record(self.empty(sum(sizes), tensors[0].width), tensors, backward)

    def parts(self, x: Tensor, sizes: list[Number]) -> list[Tensor]:
        """Views of `x`, one after the other; their gradients are put together again."""
        views = [Tensor(x.storage, size, x.width) for size in sizes]
        self.record(views[0], [x], others=views[1:])
        return views

    def repeated(self, x: Tensor, elements: Number) -> Tensor:
        """Each head several times."""
        return self.record(self.empty(elements, x.width), [x])

    def summed(self, x: Tensor, elements: Number) -> Tensor:
        """Sums over neighbours; the gradient is a view that repeats each sum's."""
        whole = x.elements
        result = self.empty(elements, x.width)
        return self.record(result, [x], lambda g: [Tensor(g.storage, whole, g.width)])

    # --- element by element ----------------------------------------------------------------------------

    def add(self, x: Tensor, other: Tensor, own_gradient: bool = False) -> Tensor:
        """`own_gradient`: where `other` is repeated, or subtracted, its gradient is not that of the sum."""
        size = other.elements, other.width

        def backward(g: Tensor) -> Gradients:
            return [g.detached(), self.empty(*size) if own_gradient else g.detached()]

        return self.record(self.like(x), [x, other], backward)

    def multiply(self, x: Tensor, other: Tensor) -> Tensor:
        """Two tensors of one shape."""
        saved = self.save(x, other)
        return self.record(self.like(x), [x, other], saved=saved)

    def scale(self, x: Tensor, factor: Tensor) -> Tensor:
        """`x` times something smaller that is repeated, of which a gradient may be wanted too."""
        wanted = factor.edge is not None
        saved = self.save(x if wanted else None, factor)
        elements, width = factor.elements, factor.width

        def backward(g: Tensor) -> Gradients:
            if not wanted:
                return [self.like(g), None]
            spread, of_x = self.like(g), self.like(g)
            return [of_x, self.cast(self.empty(elements, spread.width), width)]

        return self.record(self.like(x), [x, factor], backward, saved)

    def unary(self, x: Tensor) -> Tensor:
        """An activation such as silu or gelu: keeps its argument."""
        saved = self.save(x)
        return self.record(self.like(x), [x], saved=saved)

    def times(self, x: Tensor) -> Tensor:
        """`x` times a number; or plus one."""
        return self.record(self.like(x), [x])

    def kept_result(self, x: Tensor) -> Tensor:
        """An activation in place, such as tanh: keeps its result."""
        return self.record(x.detached(), [x], saved=self.save(x))

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
        sizes = [x.elements, weight.elements, 0 if bias is None else bias.elements]

        def backward(g: Tensor) -> Gradients:
            # None where this backward pass does not ask for it.
            owed = zip(sizes, self.wanted, strict=True)
            return [self.empty(size, g.width) if wanted else None for size, wanted in owed]

        result = self.record(result, [flat, turned, bias], backward, saved)
        return self.view(result, copied_back=turned_gradient)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, rows: Number) -> Tensor:
        """Flash attention; `rows` = queries x heads, each with a log-sum-exp."""
        result, weight = self.costly(query.elements, query.width), self.costly(rows, max(WIDE, query.width))
        saved = self.save(query, key, value, result, weight)
        return self.record(result, [query, key, value], saved=saved)

    def linear_in_8_bits(
        self,
        x: Tensor,
        casts: Casts,
        weight: Tensor,
        outputs: Number,
        bias: Tensor | None = None,
        turned_gradient: bool = False,
    ) -> Tensor:
        """As `linear`, in 8 bits, run eagerly. Backward keeps a cast of x.

        The weight is cast twice, if it was not gathered in 8 bits.
        """
        flat, turned = self.view(x), self.view(weight)
        used, kept, scale = casts.taken()
        for number in casts.told:
            self.costly(number, WIDE)
        in_8_bits = weight.width == NARROW
        narrow = None if in_8_bits else self.narrowed(weight.elements)
        result = self.costly(outputs, x.width)
        del used, narrow
        sizes = [x.elements, weight.elements]

        def backward(g: Tensor) -> Gradients:
            by_rows, by_columns = (self.narrowed(g.elements) if wanted else None for wanted in self.wanted)
            found: list[Tensor | None] = [None, None]
            if self.wanted[0]:
                narrow = self.empty(sizes[1], NARROW) if in_8_bits else self.narrowed(sizes[1])
                found[0] = self.empty(sizes[0], g.width)
                del narrow
            if self.wanted[1]:
                found[1] = self.empty(sizes[1], g.width)
            del by_rows, by_columns
            return found

        result = self.record(result, [flat, turned], backward, self.save(turned, kept, scale))
        if bias is not None:
            result = self.add(result, bias, own_gradient=True)
        return self.view(result, copied_back=turned_gradient)

    def narrowed(self, elements: Number) -> Tensor:
        """So many numbers in 8 bits; on a CPU made in float32."""
        if self.device != "cpu":
            return self.empty(elements, NARROW)
        wide = self.empty(elements, WIDE)
        scaled = self.like(wide)
        result = self.empty(elements, NARROW)
        del wide, scaled
        return result

    # --- norms -----------------------------------------------------------------------------------------

    def norm(self, x: Tensor, parameters: list[Tensor], length: int, rms: bool) -> Tensor:
        """Over rows of `length`; keeps an inverse deviation of each, and but for an RMS norm its mean."""
        rows = x.elements // length
        if rms and self.device == "cpu":
            return self._rms_by_parts(x, parameters[0], rows)
        result = self.like(x)
        width = x.width if self.device == "cpu" else max(WIDE, x.width)
        statistics = [self.empty(rows, width) for _ in range(1 if rms else 2)]
        return self.record(result, [x, *parameters], saved=self.save(x, parameters[0], *statistics))

    def _rms_by_parts(self, x: Tensor, weight: Tensor, rows: Number) -> Tensor:
        """On a CPU the norm is put together from smaller operations, and keeps two copies of its input."""
        width = x.width
        wide = self.cast(x, max(WIDE, x.width))
        inverse = self._inverse_root_mean_square(wide, rows)
        normed = self.scale(wide, inverse)
        del inverse, wide
        return self.cast(self.scale(normed, weight), width)

    def _inverse_root_mean_square(self, x: Tensor, rows: Number) -> Tensor:
        saved = self.save(x)
        squares = self.record(self.like(x), [x], self._by_power, saved)
        mean = self.record(self.empty(rows, x.width), [squares])
        del squares
        root = self.empty(rows, x.width)
        return self.record(root, [mean], self._by_power, self.save(root))

    def _by_power(self, g: Tensor) -> Gradients:
        """Backward of a power: another power of what was saved, times the exponent, times the gradient."""
        power = self.like(g)
        multiple = self.like(power)
        return [self.like(multiple)]

    # --- the ends --------------------------------------------------------------------------------------

    def embedding(self, weight: Tensor, tokens: Tensor, elements: Number) -> Tensor:
        saved = self.save(tokens)
        return self.record(self.empty(elements, weight.width), [weight], saved=saved)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Summed over tokens, of logits that are wide already."""
        flat = self.view(logits)
        result = self.like(flat)
        result = self.record(result, [flat], saved=self.save(result))
        total, weight = self.empty(1, logits.width), self.empty(1, logits.width)
        return self.record(total, [result], saved=self.save(result, targets, weight))
