"""Attention, also over a sequence that cp ranks share, on tensors that have only a size: see `program`.

The counterpart of `ring.py`, `partial_attention.py` and `ulysses.py` in `axes/runtime/`.
"""

from collections.abc import Iterator

from fivefold.ledger.setup import Number
from fivefold.replay.graph import Gradients, Tensor
from fivefold.replay.operations import Operations
from fivefold.replay.sizes import Sizes


class RingCore:
    """Keys and values of one rank after the other, travelling or gathered at once."""

    def __init__(self, t: Operations, sizes: Sizes):
        self.t, self.sizes = t, sizes
        self.travels = sizes.cp_kind == "ring"

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        t = self.t
        out, lse = self._forward()
        saved = t.save(query, key, value, out, lse)
        return t.record(out, [query, key, value], self._backward, saved, others=[lse])

    def _forward(self) -> tuple[Tensor, Tensor]:
        t, sizes = self.t, self.sizes
        if t.kept is not None:
            return t.costly(sizes.query, sizes.width), t.costly(sizes.query_rows, sizes.wide)
        out, lse = t.empty(sizes.query, sizes.wide), t.empty(sizes.query_rows, sizes.wide)
        for step in self._blocks():
            part = self._attend(step)
            factor = t.empty(_seeing(sizes.query_rows, step), sizes.wide)  # of what was there
            t.like(factor)  # of what is new
            del factor
        del part
        narrow = t.cast(out, sizes.width)
        t.keep(narrow, lse)
        return narrow, lse

    def _backward(self, g: Tensor) -> Gradients:
        t, sizes = self.t, self.sizes
        no_gradient = t.empty(sizes.query_rows, sizes.wide)  # of the log-sum-exp, which is not used
        of_query = t.empty(sizes.query, sizes.wide)
        home: tuple[Tensor, Tensor] | None = None  # sent on, and coming
        given: list[Tensor] = []
        for step in self._blocks():
            part = self._attend_backward(step)
            if not self.travels:
                # The last step that is replayed stands for all that are left.
                blocks = sizes.cp - step if step == sizes.cp_steps - 1 else 1
                given.append(t.empty(2 * sizes.kv * blocks, sizes.wide))
                continue
            of_block = t.empty(2 * sizes.kv, sizes.wide)
            gradient = of_block if home is None else t.like(of_block)
            home = gradient, t.like(gradient)
        del part, no_gradient
        if home is not None:
            mine = home[1]
        else:
            stacked = t.empty(2 * sizes.kv * sizes.cp, sizes.wide)
            mine = t.empty(2 * sizes.kv, sizes.wide)
            given.clear()
            del stacked
        result = t.cast(of_query, sizes.width)
        of_kv = t.cast(mine, sizes.width)
        halves: Gradients = [Tensor(of_kv.storage, sizes.kv, of_kv.width) for _ in range(2)]
        return [result, *halves]

    def _blocks(self) -> Iterator[int]:
        """The steps, each with the keys and values of one rank in memory, this one's first."""
        t, sizes = self.t, self.sizes
        own = block = t.empty(2 * sizes.kv, sizes.width)
        everyone = None if self.travels else t.empty(2 * sizes.kv * sizes.cp, sizes.width)
        for step in range(sizes.cp_steps):
            last = step == sizes.cp_steps - 1
            exchanged = (block, t.like(block)) if self.travels and not last else None
            yield step
            if exchanged is not None:
                block = exchanged[1]
        del own, everyone

    def _attend(self, step: int) -> tuple[Tensor, Tensor]:
        t, sizes = self.t, self.sizes
        rows, some = _seeing(sizes.query_rows, step), _seeing(sizes.query, step)
        if t.device == "cpu":
            out, lse = t.empty(some, sizes.wide), t.empty(rows, sizes.wide)
            repeated = self._repeated()
            narrow, weight = t.empty(some, sizes.width), t.empty(rows, sizes.wide)
            part = t.cast(narrow, sizes.wide), weight
            del narrow, repeated, part
            return out, lse
        tokens = [t.empty(size, sizes.width) for size in (some, sizes.kv, sizes.kv)]
        narrow, lse = t.empty(some, sizes.width), t.empty(rows, sizes.wide)
        del tokens
        return t.cast(narrow, sizes.wide), lse

    def _attend_backward(self, step: int) -> list[Tensor]:
        t, sizes = self.t, self.sizes
        some, of = _seeing(sizes.query, step), sizes.kv
        if t.device == "cpu":
            repeated = self._repeated()
            each = sizes.query  # as many key heads as query heads
            wholes = [t.empty(size, sizes.wide) for size in (some, each, each)]
            parts = [t.empty(size, sizes.width) for size in (some, each, each)]
            for part in parts:
                t.cast(part, sizes.wide)
            found = [wholes[0], t.empty(of, sizes.wide), t.empty(of, sizes.wide)]
            del repeated, parts
            return found
        flat = [t.empty(size, sizes.width) for size in (some, some, some, of, of)]
        parts = [t.empty(size, sizes.width) for size in (some, of, of)]
        del flat
        return [t.cast(part, sizes.wide) for part in parts]

    def _repeated(self) -> list[Tensor]:
        """A key head for every query head, and a value head."""
        count = 2 if self.sizes.repeats_kv else 0
        return [self.t.empty(self.sizes.query, self.sizes.width) for _ in range(count)]


def _seeing(queries: Number, step: int) -> Number:
    """How many queries see the keys of a step: this rank's own all of them, others' half. See `zigzag`."""
    return queries if step == 0 else queries // 2


def attend(t: Operations, sizes: Sizes, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The counterpart of `AttentionCore`: a kernel, or with a soft cap `models/capped.py`, tile by tile."""
    if sizes.spec.attention_softcap is None:
        return t.attention(query, key, value, sizes.query_rows)
    of_query, of_kv, tile = query.elements, value.elements, sizes.query_tile
    width, wide, casts = sizes.width, sizes.wide, sizes.width != sizes.wide

    def backward(g: Tensor) -> Gradients:
        found, sums = t.empty(of_query, width), [t.empty(of_kv, wide) for _ in range(2)]
        scores = [t.like(g), *(t.empty(tile, wide) for _ in range(3))]
        scores += [t.empty(tile, width) for _ in range(2)] if casts else [t.empty(of_query, wide)]
        del scores
        return [found, *(t.cast(gradient, width) for gradient in sums)]

    made = t.kept is not None
    result, weight = t.costly(of_query, width), t.costly(sizes.query_rows, wide)
    if not made:
        scores = [t.empty(tile, wide), *(t.empty(tile, width) for _ in range(casts))]
        del scores[:casts]
        scores += [t.empty(of_kv, width), t.empty(of_query, width)]
        del scores
    saved = t.save(query, key, value, result, weight)
    return t.record(result, [query, key, value], backward, saved)


def ulysses_core(t: Operations, sizes: Sizes, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Tokens exchanged for heads, ordinary attention, and back."""
    if sizes.ulysses_repeats:
        key, value = t.repeated(key, sizes.ulysses_kv), t.repeated(value, sizes.ulysses_kv)
    parts = [
        t.view(query, copied_back=sizes.several_ulysses_heads),
        t.view(key, copied_back=sizes.several_ulysses_kv_heads),
        t.view(value, copied_back=sizes.several_ulysses_kv_heads),
    ]
    received = _exchanged(t, t.joined(*parts), copied=False)
    whole = t.contiguous(received)
    heads = t.parts(whole, [part.elements for part in parts])
    mixed = attend(t, sizes, heads[0], heads[1], heads[2])
    del heads
    turned = sizes.turned_ulysses
    return t.view(_exchanged(t, t.view(mixed, copied_back=turned), copied=turned))


def _exchanged(t: Operations, x: Tensor, copied: bool) -> Tensor:
    first = t.like(x) if copied else x
    result = t.costly(x.elements, x.width)
    del first

    def backward(g: Tensor) -> Gradients:
        first = t.like(g)
        return [t.like(first)]

    return t.record(result, [x], backward)
