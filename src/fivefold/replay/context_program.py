"""Attention over a sequence that cp ranks share, on tensors that have only a size: see `program`.

The counterpart of `ring.py`, `partial_attention.py` and `ulysses.py` in `axes/runtime/`.
"""

from collections.abc import Iterator

from fivefold.ledger.setup import Number
from fivefold.replay.graph import Gradients, Tensor
from fivefold.replay.operations import Operations
from fivefold.replay.segments import Saved
from fivefold.replay.sizes import Sizes


class RingCore:
    """Keys and values of one rank after the other, travelling or gathered at once."""

    def __init__(self, t: Operations, sizes: Sizes):
        self.t, self.sizes = t, sizes
        self.travels = sizes.cp_kind == "ring"

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        t = self.t
        inputs = t.save(query, key, value)
        out, lse = self._forward(query)
        saved = inputs + t.save(out, lse)
        return t.record(out, [query, key, value], self._backward, saved, others=[lse])

    def _forward(self, query: Tensor) -> tuple[Tensor, Tensor]:
        t, sizes = self.t, self.sizes
        if t.has_kept:
            return t.costly(query.elements, query.width), t.costly(sizes.query_rows, sizes.wide)
        out, lse = t.empty(query.elements, sizes.wide), t.empty(sizes.query_rows, sizes.wide)
        for step in self._blocks():
            queries, keys = self._seen(step)
            part = self._attend(queries, keys)
            self._merge(queries)
        del part
        narrow = t.cast(out, query.width)
        t.keep(narrow, lse)
        return narrow, lse

    def _backward(self, g: list[Tensor], saved: Saved) -> Gradients:
        t, sizes = self.t, self.sizes
        query = saved[0]
        no_gradient = t.empty(sizes.query_rows, sizes.wide)  # of the log-sum-exp, which is not used
        of_query = t.empty(query.elements, sizes.wide)
        home: tuple[Tensor, Tensor] | None = None  # sent on, and coming
        given: list[Tensor] = []
        for step in self._blocks():
            queries, keys = self._seen(step)
            part = self._attend_backward(queries, keys)
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
        result = t.cast(of_query, query.width)
        of_kv = t.cast(mine, query.width)
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

    def _seen(self, step: int) -> tuple[float, float]:
        """Which part of the queries sees which part of the keys: see `axes.zigzag`."""
        if step == 0:
            return 1, 1
        return 0.5, 1

    def _attend(self, queries: float, keys: float) -> tuple[Tensor, Tensor]:
        t, sizes = self.t, self.sizes
        rows, some = _part(sizes.query_rows, queries), _part(sizes.query, queries)
        if t.device == "cpu":
            out, lse = t.empty(some, sizes.wide), t.empty(rows, sizes.wide)
            repeated = self._repeated(keys)
            narrow, weight = t.empty(some, sizes.width), t.empty(rows, sizes.wide)
            part = t.cast(narrow, sizes.wide), weight
            del narrow, repeated, part
            return out, lse
        tokens = t.empty(some, sizes.width), self._flat(keys), self._flat(keys)
        narrow, lse = t.empty(some, sizes.width), t.empty(rows, sizes.wide)
        del tokens
        return t.cast(narrow, sizes.wide), lse

    def _attend_backward(self, queries: float, keys: float) -> list[Tensor]:
        t, sizes = self.t, self.sizes
        some, of = _part(sizes.query, queries), _part(sizes.kv, keys)
        if t.device == "cpu":
            repeated = self._repeated(keys)
            each = _part(sizes.query, keys)  # as many key heads as query heads
            wholes = [t.empty(size, sizes.wide) for size in (some, each, each)]
            parts = [t.empty(size, sizes.width) for size in (some, each, each)]
            for part in parts:
                t.cast(part, sizes.wide)
            found = [wholes[0], t.empty(of, sizes.wide), t.empty(of, sizes.wide)]
            del repeated, parts
            return found
        flat = [t.empty(some, sizes.width) for _ in range(3)], self._flat(keys), self._flat(keys)
        parts = [t.empty(size, sizes.width) for size in (some, of, of)]
        del flat
        return [t.cast(part, sizes.wide) for part in parts]

    def _repeated(self, keys: float) -> list[Tensor]:
        """A key head for every query head, and a value head."""
        if not self.sizes.repeats_kv:
            return []
        size = _part(self.sizes.query, keys)
        return [self.t.empty(size, self.sizes.width) for _ in range(2)]

    def _flat(self, keys: float) -> Tensor:
        return self.t.empty(_part(self.sizes.kv, keys), self.sizes.width)

    def _merge(self, queries: float) -> None:
        both = self.t.empty(_part(self.sizes.query_rows, queries), self.sizes.wide)
        self.t.like(both)  # the factor of what was there, and then of what is new


def _part(size: Number, fraction: float) -> Number:
    return size if fraction == 1 else size // 2


def ulysses_core(t: Operations, sizes: Sizes, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Tokens exchanged for heads, ordinary attention, and back."""
    if sizes.ulysses_repeats:
        key, value = t.repeated(key, sizes.ulysses_kv), t.repeated(value, sizes.ulysses_kv)
    parts = [
        t.view(query, copied_back=not sizes.one_ulysses_head),
        t.view(key, copied_back=not sizes.one_ulysses_kv_head),
        t.view(value, copied_back=not sizes.one_ulysses_kv_head),
    ]
    received = _exchanged(t, t.joined(*parts), copied=False)
    whole = t.contiguous(received)
    heads = t.parts(whole, [part.elements for part in parts])
    mixed = t.attention(heads[0], heads[1], heads[2], sizes.query_rows)
    del heads
    turned = not (sizes.one_row and sizes.one_ulysses_head)
    return t.view(_exchanged(t, t.view(mixed, copied_back=turned), copied=turned))


def _exchanged(t: Operations, x: Tensor, copied: bool) -> Tensor:
    first = t.like(x) if copied else x
    result = t.costly(x.elements, x.width)
    del first

    def backward(g: list[Tensor], _: Saved) -> Gradients:
        first = t.like(g[0])
        return [t.like(first)]

    return t.record(result, [x], backward)
