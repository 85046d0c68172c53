"""The model's forward pass once more, line by line, on tensors that have only a size: see `tape`.

Each class is the counterpart of one of `models/` (or of what the axes put in its place), has its name, and
does what it does in the same order: a variable that lives longer here would be memory that lives longer.
"""

from collections.abc import Sequence
from functools import partial

from fivefold.ledger.setup import segment_length
from fivefold.replay.context_program import RingCore, ulysses_core
from fivefold.replay.expert_program import mixture
from fivefold.replay.graph import Tensor
from fivefold.replay.layers_program import (
    Column,
    Layer,
    Mlp,
    Norm,
    Parameters,
    Rope,
    Row,
    stream_norm,
)
from fivefold.replay.operations import Operations
from fivefold.replay.shared_program import vocabulary_embedding, vocabulary_loss


class Embedding:
    def __init__(self, make: Parameters):
        self.t, self.sizes, self.stream = make.t, make.sizes, make.stream
        spec = self.sizes.spec
        self.tokens = make(self.sizes.vocabulary * spec.dim)
        self.positions = make.maybe(spec.positions == "learned", spec.max_seq_len * spec.dim)

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        t, sizes = self.t, self.sizes
        if self.stream is not None:
            x = vocabulary_embedding(t, sizes, self.stream, self.tokens, tokens)
        else:
            x = t.embedding(self.tokens, tokens, sizes.stream)
        if self.positions is None:
            return x
        places = t.embedding(self.positions, positions, sizes.stream // sizes.rows)
        return t.add_repeated(x, places)


class Block:
    def __init__(self, make: Parameters):
        self.t, spec = make.t, make.sizes.spec
        self.attention_norm = stream_norm(make)
        self.attention = Attention(make)
        self.mlp_norm = None if spec.parallel_block else stream_norm(make)
        dense = spec.experts is None
        self.mlp: Layer = Mlp(make, spec.ffn) if dense else mixture(make)

    def __call__(self, x: Tensor, rope: Rope | None) -> Tensor:
        normed = self.attention_norm(x)
        attended = self.attention(normed, rope)
        if self.mlp_norm is None:
            added = self.mlp(normed)
            return self.t.add(self.t.add(x, attended), added)
        x = self.t.add(x, attended)
        added = self.mlp(self.mlp_norm(x))
        return self.t.add(x, added)


class Attention:
    def __init__(self, make: Parameters):
        self.t, self.sizes = make.t, make.sizes
        sizes, spec = self.sizes, self.sizes.spec
        query, head, bias = sizes.heads * spec.head_dim, spec.head_dim, spec.qkv_bias
        kv, used = (spec.kv_heads * head, head) if sizes.whole_kv else (sizes.kv_heads * head, None)
        self.query = Column(make, query, bias)
        self.key = Column(make, kv, bias, used)
        self.value = Column(make, kv, bias, used)
        self.output = Row(make, query, spec.attention_out_bias)
        self.query_norm = Norm(make, head, True, False) if spec.qk_norm else None
        self.key_norm = Norm(make, head, True, False) if spec.qk_norm else None

    def __call__(self, x: Tensor, rope: Rope | None) -> Tensor:
        t, sizes = self.t, self.sizes
        # Rotating puts each head's tokens side by side; with one head there is only one order.
        turned = rope is not None and not sizes.one_head
        turned_key = rope is not None and not sizes.one_kv_head
        query = t.view(self.query(x), copied_back=turned)
        key = t.view(self.key(x), copied_back=turned_key)
        value = t.view(self.value(x))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rope is not None:
            query, key = self.rotate(query, *rope), self.rotate(key, *rope)
        mixed = t.view(self.core(query, key, value))
        return self.output(t.contiguous(mixed) if self._mixed_by_head(turned) else mixed)

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not self.sizes.several_cp:
            return self.t.attention(query, key, value, self.sizes.query_rows)
        if self.sizes.cp_kind == "ulysses":
            return ulysses_core(self.t, self.sizes, query, key, value)
        return RingCore(self.t, self.sizes)(query, key, value)

    def _mixed_by_head(self, turned: bool) -> bool:
        """Whether the core's result has each head's tokens side by side, not each token's heads.

        Kernels give it the order that the queries have.
        """
        return self.sizes.cp_kind == "ulysses" if self.sizes.several_cp else turned

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        t = self.t
        first, second = t.parts(t.cast(x, cos.width), [x.elements // 2] * 2)
        turned = t.joined(
            t.subtract(t.scale(first, cos), t.scale(second, sin)),
            t.add(t.scale(second, cos), t.scale(first, sin)),
        )
        return t.cast(turned, x.width)


class Head:
    """The last norm, logits and the summed loss."""

    def __init__(self, make: Parameters):
        self.t, self.sizes = make.t, make.sizes
        self.norm = stream_norm(make)
        self.output = make(self.sizes.vocabulary * self.sizes.spec.dim)

    def __call__(self, x: Tensor, targets: Tensor) -> Tensor:
        t, sizes = self.t, self.sizes
        logits = t.linear(self.norm(x), self.output, sizes.tokens * sizes.vocabulary)
        if sizes.several_tp:
            return vocabulary_loss(t, logits, targets, sizes.wide)
        return t.cross_entropy(t.cast(logits, sizes.wide), targets)


def selected(t: Operations, block: Layer) -> Layer:
    """A block that keeps what is costly to compute, and recomputes the rest."""
    return lambda x, rope: t.checkpoint(lambda again: block(again, rope), x, selective=True)


def blocks_runner(t: Operations, blocks: Sequence[Layer], recompute: str) -> Layer:
    """What runs neighbouring blocks one after the other, recomputed in segments where `recompute` says so."""
    length = segment_length(recompute, len(blocks))

    def several(some: Sequence[Layer], rope: Rope | None, x: Tensor) -> Tensor:
        for block in some:
            x = block(x, rope)
        return x

    def segments(x: Tensor, rope: Rope | None) -> Tensor:
        assert length is not None
        for start in range(0, len(blocks), length):
            x = t.checkpoint(partial(several, blocks[start : start + length], rope), x)
        return x

    return segments if length is not None else lambda x, rope: several(blocks, rope, x)
