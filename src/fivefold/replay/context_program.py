"""Attention, also over a sequence that cp ranks share, on tensors that have only a size: see `program`.

The counterpart of `ring.py`, `partial_attention.py`, `merging.py` and `ulysses.py` in `axes/runtime/`.
"""

from collections.abc import Iterator

from fivefold.ledger.setup import Number
from fivefold.ledger.work import BLOCKS_AT_ONCE
from fivefold.replay.graph import Gradients, Tensor
from fivefold.replay.operations import Operations
from fivefold.replay.sizes import Sizes


class RingCore:
    """Keys and values of one rank after the other, which travel; or of all of them, gathered at once.

    That of the first rank: others' keys are seen by the second half of its queries, all of them.
    """

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
        own = t.empty(2 * sizes.kv, sizes.width)
        parts: list[tuple[Tensor, ...]] = []
        for queries, keys, _block in self._pieces(own):
            self._add(parts, self._attend(queries, keys))
        out = t.empty(sizes.query, sizes.width)
        lse = self._put_together(parts)
        assert lse is not None
        del own, _block
        t.keep(out, lse)
        return out, lse

    def _backward(self, g: Tensor) -> Gradients:
        t, sizes = self.t, self.sizes
        no_gradient = t.empty(sizes.query_rows, sizes.wide)  # of the log-sum-exp, which is not used
        parts: list[tuple[Tensor, ...]] = []
        grads: list[Tensor] = []  # sent on, and coming; or of all blocks
        own = t.empty(2 * sizes.kv, sizes.width)
        for queries, keys, _block in self._pieces(own):
            found = self._attend_backward(queries, keys)
            if not grads:
                grads = [t.empty(2 * sizes.kv * (1 if self.travels else sizes.cp), sizes.wide)]
            if self.travels:
                grads = [grads[-1], t.like(grads[-1])]
            self._add(parts, (found[0],))
        results: Gradients = [t.empty(size, sizes.width) for size in (sizes.query, sizes.kv, sizes.kv)]
        self._put_together(parts)
        if not self.travels:
            grads.append(t.empty(2 * sizes.kv, sizes.wide))
        del no_gradient, own, _block, found
        return results

    def _pieces(self, own: Tensor) -> Iterator[tuple[Number, Number, Tensor]]:
        """Queries and keys of each piece, in elements, and the block they are in, this rank's own first."""
        t, sizes = self.t, self.sizes
        if not self.travels:
            everyone = t.empty(2 * sizes.kv * sizes.cp, sizes.width)
            yield sizes.query, sizes.kv, everyone
            yield sizes.query // 2, sizes.kv * (sizes.cp - 1), everyone
            return
        block = own
        for step in range(sizes.cp_steps):
            last = step == sizes.cp_steps - 1
            exchanged = None if last else (block, t.like(block))
            yield sizes.query if step == 0 else sizes.query // 2, sizes.kv, block
            if exchanged is not None:
                block = exchanged[1]

    def _attend(self, queries: Number, keys: Number) -> tuple[Tensor, Tensor]:
        t, sizes = self.t, self.sizes
        repeated = self._repeated(keys)
        out, lse = t.empty(queries, sizes.width), t.empty(self._rows(queries), sizes.wide)
        del repeated
        return out, lse

    def _attend_backward(self, queries: Number, keys: Number) -> list[Tensor]:
        t, sizes = self.t, self.sizes
        repeated = self._repeated(keys)
        if not repeated:
            return [t.empty(size, sizes.width) for size in (queries, keys, keys)]
        parts = [t.empty(size, sizes.width) for size in (queries, *(each.elements for each in repeated))]
        return [parts[0], t.empty(keys, sizes.wide), t.empty(keys, sizes.wide)]

    def _repeated(self, keys: Number) -> list[Tensor]:
        """A key head for every query head, and a value head: a GPU's kernels do without."""
        sizes = self.sizes
        count = 2 if sizes.repeats_kv and self.t.device == "cpu" else 0
        return [self.t.empty(keys // sizes.kv_heads * sizes.heads, sizes.width) for _ in range(count)]

    def _rows(self, queries: Number) -> Number:
        return queries // self.sizes.spec.head_dim

    def _add(self, parts: list[tuple[Tensor, ...]], part: tuple[Tensor, ...]) -> None:
        """As `Parts.add` of `merging`."""
        if len(parts) == BLOCKS_AT_ONCE:
            wide = self.t.empty(self.sizes.query, self.sizes.wide)
            lse = self._put_together(parts)
            parts[:] = [(wide,) if lse is None else (wide, lse)]
        parts.append(part)

    def _put_together(self, parts: list[tuple[Tensor, ...]]) -> Tensor | None:
        """Parts, with log-sum-exps or without, put into a tensor that is there: in one pass, or by torch."""
        t, sizes = self.t, self.sizes
        weighed = len(parts[0]) == 2
        lse = t.empty(sizes.query_rows, sizes.wide) if weighed else None
        if t.device == "cpu":
            wide = t.empty(sizes.query, sizes.wide)
            for value, *_ in parts[1:] if weighed else ():
                t.empty(value.elements, sizes.wide)
            del wide
        return lse


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
    received = _exchanged(t, t.joined(*parts))
    heads = t.parts(received, [part.elements for part in parts])
    mixed = attend(t, sizes, heads[0], heads[1], heads[2])
    del heads
    # The CPU's kernel lays its result out row by row, not token by token.
    turned = t.device == "cpu" and sizes.several_rows and sizes.spec.attention_softcap is None
    return t.view(_exchanged(t, t.view(mixed), copied=turned, copied_back=True))


def _exchanged(t: Operations, x: Tensor, copied: bool = False, copied_back: bool = False) -> Tensor:
    first = t.like(x) if copied else x
    result = t.costly(x.elements, x.width)
    del first

    def backward(g: Tensor) -> Gradients:
        first = t.like(g) if copied_back else g
        return [t.like(first)]

    return t.record(result, [x], backward)
