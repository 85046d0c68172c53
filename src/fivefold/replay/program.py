"""The model's forward pass once more, line by line, on tensors that have only a size: see `tape`.

Each function is the counterpart of a class of `models/` (or of what the axes put in its place), has its name,
and does what it does in the same order: a variable that lives longer here would be memory that lives longer.
Parameters take no memory here, and are made where they are used.
"""

from fivefold.ledger.fp8 import HEAD
from fivefold.replay.chunked_program import chunked_loss
from fivefold.replay.context_program import RingCore, attend, ulysses_core
from fivefold.replay.expert_program import mixture
from fivefold.replay.graph import Tensor
from fivefold.replay.layers_program import (
    column,
    head_norm,
    in_8_bits,
    linear,
    mlp,
    norm_after,
    row,
    stream_norm,
    weight_of,
)
from fivefold.replay.operations import WIDE, Operations
from fivefold.replay.shared_program import vocabulary_embedding, vocabulary_loss
from fivefold.replay.sizes import Sizes

Rope = tuple[Tensor, Tensor]
"""Cosines and sines that rotate queries and keys."""


def rotary_tables(t: Operations, sizes: Sizes) -> Rope | None:
    """What all blocks of a stage share."""
    if sizes.spec.positions != "rope":
        return None
    angles = t.empty(sizes.table, WIDE)
    cos, sin = t.empty(sizes.table, sizes.wide), t.empty(sizes.table, sizes.wide)
    del angles
    return cos, sin


def embedding(t: Operations, sizes: Sizes, tokens: Tensor, positions: Tensor) -> Tensor:
    spec = sizes.spec
    weight = t.parameter(sizes.vocabulary * spec.dim, sizes.width)
    if sizes.several_tp:
        x = vocabulary_embedding(t, sizes, weight)
    else:
        x = t.embedding(weight, tokens, sizes.stream)
    if spec.scale_embedding:
        x = t.scale(x, t.empty(1, sizes.width))
    if spec.positions != "learned":
        return x
    table = t.parameter(spec.max_seq_len * spec.dim, sizes.width)
    places = t.embedding(table, positions, sizes.stream // sizes.rows)
    return t.add(x, places, own_gradient=True)


def block(t: Operations, sizes: Sizes, x: Tensor, rope: Rope | None) -> Tensor:
    normed = stream_norm(t, sizes, x)
    attended = norm_after(t, sizes, attention(t, sizes, normed, rope))
    if sizes.spec.parallel_block:
        added = norm_after(t, sizes, feed_forward(t, sizes, normed))
        return t.add(t.add(x, attended), added)
    x = t.add(x, attended)
    added = norm_after(t, sizes, feed_forward(t, sizes, stream_norm(t, sizes, x)))
    return t.add(x, added)


def feed_forward(t: Operations, sizes: Sizes, x: Tensor) -> Tensor:
    return mlp(t, sizes, x, sizes.spec.ffn) if sizes.spec.experts is None else mixture(t, sizes, x)


def attention(t: Operations, sizes: Sizes, x: Tensor, rope: Rope | None) -> Tensor:
    spec, bias = sizes.spec, sizes.spec.qkv_bias
    width, kv_width = sizes.heads * spec.head_dim, sizes.kv_heads * spec.head_dim
    held = spec.kv_heads * spec.head_dim if sizes.whole_kv else None
    names = "attention.query", "attention.key", "attention.value"
    of_query, of_key, of_value = map(in_8_bits(t, sizes, x, *names).get, names)
    query = t.view(column(t, sizes, x, width, bias, casts=of_query), copied_back=sizes.turned_query)
    key = t.view(column(t, sizes, x, kv_width, bias, held, of_key), copied_back=sizes.turned_key)
    value = t.view(column(t, sizes, x, kv_width, bias, held, of_value))
    if spec.qk_norm:
        query, key = head_norm(t, sizes, query), head_norm(t, sizes, key)
    if rope is not None:
        query, key = rotate(t, query, *rope), rotate(t, key, *rope)
    if spec.query_factor != 1:
        query = t.times(query)
    mixed = t.view(core(t, sizes, query, key, value))
    # Kernels give their result the order that the queries have: each head's tokens side by side, or each
    # token's heads.
    by_head = sizes.cp_kind == "ulysses" if sizes.several_cp else sizes.turned_query
    bias = spec.attention_out_bias
    return row(t, sizes, t.contiguous(mixed) if by_head else mixed, width, bias, what="attention.output")


def core(t: Operations, sizes: Sizes, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if not sizes.several_cp:
        return attend(t, sizes, query, key, value)
    if sizes.cp_kind == "ulysses":
        return ulysses_core(t, sizes, query, key, value)
    return RingCore(t, sizes)(query, key, value)


def rotate(t: Operations, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = t.parts(t.cast(x, cos.width), [x.elements // 2] * 2)
    turned = t.joined(
        t.add(t.scale(first, cos), t.scale(second, sin), own_gradient=True),
        t.add(t.scale(second, cos), t.scale(first, sin)),
    )
    return t.cast(turned, x.width)


def head(t: Operations, sizes: Sizes, x: Tensor, targets: Tensor) -> Tensor:
    """The last norm, logits and the summed loss."""
    elements = sizes.vocabulary * sizes.spec.dim
    if sizes.in_chunks:
        return chunked_loss(t, sizes, stream_norm(t, sizes, x), t.parameter(elements, sizes.width))
    normed = stream_norm(t, sizes, x)
    casts = in_8_bits(t, sizes, normed, HEAD).get(HEAD)
    weight = weight_of(t, sizes, elements, casts, sizes.gathers_head)
    logits = linear(t, normed, weight, sizes.tokens * sizes.vocabulary, casts=casts)
    del normed
    if sizes.spec.final_softcap is not None:
        logits = t.times(t.kept_result(t.times(logits)))
    if sizes.several_tp:
        return vocabulary_loss(t, sizes, logits, targets)
    return t.cross_entropy(t.cast(logits, sizes.wide), targets)


def several_blocks(
    t: Operations, sizes: Sizes, x: Tensor, rope: Rope | None, count: int, selective: bool
) -> Tensor:
    """Several neighbours; `selective`: each keeps what is costly to compute, and the rest is made again."""
    for _ in range(count):
        if selective:
            x = t.checkpoint(lambda again: block(t, sizes, again, rope), x, selective=True)
        else:
            x = block(t, sizes, x, rope)
    return x
