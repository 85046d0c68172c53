"""The work of one rank for one micro-batch: matrix products by shape, attention, and bytes moved by the rest.

Sizes come from a `Setup`, and may be arrays over many layouts. FLOPs are those that are run: attention is
counted as a full square by `flops`, and `causal` says which part of it a kernel that skips the masked half
computes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fivefold.ledger.fp8 import HEAD, gathered, input_of, is_of_experts, may_take_part, takes_part
from fivefold.ledger.setup import Condition, Figure, Number, Setup
from fivefold.models.flops import keys_seen
from fivefold.models.spec import QUERY_TILE

Phase = Literal["forward", "backward-input", "backward-weight"]
"""As the pipeline's schedules name them: `backward-weight` can wait, `backward-input` is waited for."""


@dataclass(frozen=True)
class Work:
    """One operation, `count` times.

    what     its name, such as "attention.query"
    flops    of one, in floating-point operations; 0 for what is bound by memory
    moved    bytes that one reads and writes
    shape    of a matrix product: [rows, inner] x [inner, columns], `batch` of them at once
             of attention: rows = queries, inner = head_dim, columns = keys, batch = heads x sequences
    causal   of attention: the fraction of `flops` that lies below the diagonal
    copied   bytes that kernels around it read and write, which no compiler fuses: copies, casts and sums
    starts   the host's time for one, what is around it included, in starts of a kernel
    fp8      of a matrix product: whether it takes numbers of 8 bits
    """

    what: str
    kind: Literal["matmul", "attention", "memory"]
    phase: Phase
    flops: Figure
    moved: Figure
    rows: Number = 0
    inner: Number = 0
    columns: Number = 0
    batch: Number = 1
    count: Number = 1
    causal: Figure = 1.0
    copied: Figure = 0.0
    starts: int = 1
    fp8: Condition = False


def linears(
    setup: Setup, layers: Mapping[str, tuple[Number, Number]], rows: Number | None = None, experts: Number = 1
) -> Iterator[Work]:
    """Linear layers by their inputs and outputs on one rank: products, in 8 bits where they are large enough,
    and what casting for these moves. All tokens of a micro-batch pass them; or `rows` each of some experts.
    """
    rows = setup.tokens if rows is None else rows
    size = setup.precision.compute_bytes
    for what, (inner, columns) in layers.items():
        in_fp8 = takes_part(setup, what, inner, columns)
        for item in matmul(what, rows, inner, columns, size, experts):
            made = item.rows * item.columns
            narrow = 1.0 * experts * (item.rows * item.inner + item.inner * item.columns + size * made)
            yield replace(item, fp8=in_fp8, moved=np.where(in_fp8, narrow, item.moved)[()])
    if any(may_take_part(setup, what) for what in layers):
        yield from _casts(setup, layers, rows * experts, experts)


def _casts(
    setup: Setup, layers: Mapping[str, tuple[Number, Number]], rows: Number, experts: Number
) -> Iterator[Work]:
    """What passes over numbers move. One finds the largest (of a whole weight that is known from the update),
    one casts: inputs and gradients both ways, in their order and transposed; weights one way in forward, and
    the other way in backward.

    What experts take is cast in its order alone, rowwise twice; in backward all of it is transposed.

    Layers that read the same share its casts. (What is gathered in 8 bits is not cast here: each rank has
    cast its shard, as it would to bfloat16. Its bytes are turned in backward.)
    """
    size = setup.precision.compute_bytes
    both, found = size + (size + 2), 0 if setup.fp8 == "tensorwise" else size
    one, turned = found + (size + 1), 0
    if any(is_of_experts(what) for what in layers):
        both, turned = (1 if setup.fp8 == "tensorwise" else 2) * (size + (size + 1)), 2
    inputs: dict[str, Figure] = {}
    forward: Figure = 0.0
    backward: Figure = 0.0
    for what, (inner, columns) in layers.items():
        takes = 1.0 * takes_part(setup, what, inner, columns)
        read = takes * rows * inner
        inputs[input_of(what)] = np.maximum(inputs.get(input_of(what), 0.0), read)
        weight, gradient = takes * experts * inner * columns, takes * rows * columns
        in_8_bits = gathered(setup, what)
        forward = forward + (0 if in_8_bits else one) * weight
        backward = backward + (2 if in_8_bits else one) * weight + both * gradient
        backward = backward + turned * (weight + gradient + read)
    for read in inputs.values():
        forward = forward + both * read
    yield from memory(f"{next(iter(layers)).rpartition('.')[0]}.casts", forward, backward)


def matmul(
    what: str, rows: Number, inner: Number, columns: Number, size: int, batch: Number = 1
) -> Iterator[Work]:
    """[rows, inner] x [inner, columns], forward and both halves of backward; `size` bytes an element."""
    flops = 2.0 * batch * rows * inner * columns
    moved = 1.0 * size * batch * (rows * inner + inner * columns + rows * columns)
    yield Work(what, "matmul", "forward", flops, moved, rows, inner, columns, batch)
    yield Work(what, "matmul", "backward-input", flops, moved, rows, columns, inner, batch)
    yield Work(what, "matmul", "backward-weight", flops, moved, columns, rows, inner, batch)


def memory(what: str, forward: Figure, backward: Figure) -> Iterator[Work]:
    """Something bound by memory: bytes read and written, forward and backward."""
    yield Work(what, "memory", "forward", 0.0, forward)
    yield Work(what, "memory", "backward-input", 0.0, backward)


def block_work(setup: Setup) -> list[Work]:
    """One block, one micro-batch, one rank; without what recomputation repeats."""
    return [*_attention(setup), *_mlp(setup), *_between(setup)]


def recomputed(work: list[Work], last: bool = False) -> list[Work]:
    """What running a block's forward again adds, before its backward.

    last  it is the last of the blocks that are run again together. There it is left off where everything is
          saved that backward needs: before its last product, of which only the input is.
    """
    again = [replace(item, phase="backward-input") for item in work if item.phase == "forward"]
    products = [item.what for item in again if item.kind == "matmul"]
    # Results of experts are weighted, and those of a layer with a norm behind it normed, and so needed.
    if not last or products[-1] == "mlp.experts.down" or again[-1].what == "norms.after":
        return again
    # A product in 8 bits is one with what it saves.
    return [
        replace(item, count=item.count * (1 * item.fp8)) if item.what == products[-1] else item
        for item in again
        if item.what != products[-1] or np.any(item.fp8)
    ]


def embedding_work(setup: Setup) -> list[Work]:
    stream = 1.0 * setup.tokens * setup.spec.dim * setup.precision.compute_bytes
    scaled = 2 * stream if setup.spec.scale_embedding else 0.0
    return list(memory("embedding", 2 * stream + scaled, 3 * stream + scaled))


def head_work(setup: Setup) -> list[Work]:
    """The last norm, the output projection and the loss."""
    spec, size = setup.spec, setup.precision.compute_bytes
    vocabulary = -(-spec.vocab_size // setup.tp)
    logits = 1.0 * setup.tokens * vocabulary
    wide = max(4, size)
    stream = 1.0 * setup.tokens * spec.dim * size / setup.stream_split
    capped = logits * size if spec.final_softcap is not None else 0.0
    norm = list(memory("head.norm", 2 * stream, 3 * stream))
    if setup.loss_chunk:
        return [*norm, *_chunked_head(setup, vocabulary)]
    return [
        *norm,
        *linears(setup, {HEAD: (spec.dim, vocabulary)}),
        # The cast up; log-softmax and its gradient, each read and written; the cast down.
        *memory("loss", logits * (size + 4 * wide) + 6 * capped, logits * (size + 4 * wide) + 7 * capped),
    ]


def _chunked_head(setup: Setup, vocabulary: Number) -> Iterator[Work]:
    """The output projection and the loss as `models/chunked_loss.py` computes them.

    Gradients are made in forward, and added up in the wide dtype; backward scales them, and casts them down.
    """
    spec, size = setup.spec, setup.precision.compute_bytes
    wide = max(4, size)
    # What a product writes, in wide numbers: the gradient of the input once, that of the weight with each
    # chunk, which reads it too.
    more = {"forward": 0, "backward-input": wide - size, "backward-weight": 2 * wide - size}
    for tokens, count in setup.loss_chunks:
        rows: Any = np.maximum(tokens, 1)  # even of a chunk that there is not
        for item in matmul("head.output", rows, spec.dim, vocabulary, size):
            moved = item.moved + 1.0 * more[item.phase] * item.rows * item.columns
            yield replace(item, phase="forward", moved=moved, count=count)
        # As much as without chunks.
        capped = 13 * size if spec.final_softcap is not None else 0
        moved = 1.0 * tokens * vocabulary * (2 * size + 8 * wide + capped)
        yield Work("loss", "memory", "forward", 0.0, moved, count=count)
    gradients = (wide + size) * 1.0 * spec.dim
    yield Work("loss", "memory", "backward-input", 0.0, gradients * setup.tokens)
    yield Work("loss", "memory", "backward-weight", 0.0, gradients * vocabulary)


def _attention(setup: Setup) -> Iterator[Work]:
    spec, size = setup.spec, setup.precision.compute_bytes
    tokens, heads = setup.tokens, spec.heads // setup.tp
    query, kv = heads * spec.head_dim, setup.kv_heads * spec.head_dim
    widths: dict[str, tuple[Number, Number]] = {
        "attention.query": (spec.dim, query),
        "attention.key": (spec.dim, kv),
        "attention.value": (spec.dim, kv),
        "attention.output": (query, spec.dim),
    }
    yield from linears(setup, widths)
    if spec.positions == "rope":
        rotated = 1.0 * tokens * (query + kv)
        yield from memory("rope", 2 * size * rotated, 2 * size * rotated)
    if spec.query_factor != 1:
        yield from memory("attention.scale", 2.0 * size * tokens * query, 2.0 * size * tokens * query)
    if setup.cp_kind in ("ring", "allgather"):
        yield from _pieces(setup)
        return
    visible = keys_seen(spec, setup.seq_len) / setup.seq_len
    attended = _attend(setup, setup.seq_len, visible)
    yield from attended if spec.attention_softcap is None else _capped(setup, attended, visible)


CAPPED = ((20, 18, 4), (40, 32, 8))
"""Of `models/capped.py`, forward and backward: kernels for a tile of queries, and how often they read or
write each score in the wide dtype and in the narrow one."""


def _capped(setup: Setup, attended: Iterator[Work], visible: float) -> Iterator[Work]:
    """Attention by matrix products, with its scores in memory; under a compiler too."""
    narrow, tiles = setup.precision.compute_bytes, -(-setup.seq_len // QUERY_TILE)
    for item, (kernels, in_wide, in_narrow) in zip(attended, CAPPED, strict=True):
        scores = 1.0 * item.batch * item.rows * item.columns * visible
        copied = scores * (in_wide * max(4, narrow) + in_narrow * narrow)
        yield replace(item, copied=copied, starts=kernels * tiles)


def _attend(setup: Setup, keys: Number, causal: float) -> Iterator[Work]:
    """A rank's queries, forward and backward, against some keys."""
    spec, heads = setup.spec, setup.spec.heads // setup.tp
    flops = 4.0 * setup.tokens * heads * spec.head_dim * keys
    moved = 2.0 * setup.precision.compute_bytes * setup.tokens * (heads + setup.kv_heads) * spec.head_dim
    rows, batch = setup.seq_len // setup.cp, heads * setup.micro_batch
    sizes = (rows, spec.head_dim, keys, batch)
    forward = Work("attention", "attention", "forward", flops, moved, *sizes, causal=causal)
    yield forward
    # Five products where forward has two: scores are made again.
    yield replace(forward, phase="backward-input", flops=2.5 * flops, moved=2 * moved)


BLOCKS_AT_ONCE = 4
"""Of so many blocks of keys the results are kept before they are put together (`axes/runtime/merging.py`)."""
PIECE = "attention.piece"
PIECE_STARTS = (14, 60)
"""The host's time for each piece, forward and backward, in starts of a kernel: most of it for messages, views
and autograd. It was 40 and 110 when a piece called torch 37 and 52 times, measured on the host of an H200
(0.35 and 1 ms); now it calls it 12 and 30 times, and is not measured."""


def _pieces(setup: Setup) -> Iterator[Work]:
    """Attention to a rank's own keys and to those of other ranks, as `axes/runtime/ring.py` computes it.

    It is that of the last rank, which has the most to put together and which the others wait for: of its own
    keys it computes the square, and all its queries see the first half of every other rank's: one rank after
    the other, or at once where they were gathered. Copies and sums run one by one, under a compiler too.
    """
    spec, narrow = setup.spec, setup.precision.compute_bytes
    wide = max(4, narrow)
    query = 1.0 * setup.tokens * (spec.heads // setup.tp) * spec.head_dim
    block = 2.0 * setup.tokens * setup.kv_heads * spec.head_dim  # a rank's keys and values
    length = setup.seq_len // setup.cp
    gathered = setup.cp_kind == "allgather"
    others = setup.cp - 1
    ranks, count = (np.maximum(others, 1), np.minimum(others, 1)) if gathered else (1, others)
    # Keys and values side by side. What was put together in between, and goes on from there in wide numbers.
    turns = 0 if gathered else np.maximum(others - 1, 0) // (BLOCKS_AT_ONCE - 1)
    ends = 2 * narrow * block + narrow * query + 2 * wide * query * turns
    for own, keys, seen in ((True, length, block), (False, length // 2 * ranks, block / 2 * ranks)):
        # Its result is read to be put together; gathered keys are put side by side.
        forward = narrow * query + (2 * narrow * seen if gathered and not own else 0)
        # Likewise its query's gradient; those of keys are written in wide numbers, or added to such.
        backward = forward + (narrow + wide * (1 if own or gathered else 2)) * seen
        if gathered and not own:
            backward = backward + wide * seen  # zeros for the other half
        copied = (forward + ends, backward + ends + (wide + narrow) * block) if own else (forward, backward)
        attended = _attend(setup, keys, 0.5 if own else 1.0)
        for item, size, starts in zip(attended, copied, PIECE_STARTS, strict=True):
            yield replace(item, what=PIECE, count=1 if own else count, copied=size, starts=starts)


def _mlp(setup: Setup) -> Iterator[Work]:
    spec, size = setup.spec, setup.precision.compute_bytes
    if spec.experts is None or spec.experts_per_token is None:
        yield from _feed_forward("mlp", setup, setup.tokens, spec.ffn // setup.tp, 1)
        return
    yield from matmul("mlp.router", setup.tokens, spec.dim, spec.experts, max(4, size))
    # Each rank holds experts / ep of them, and by balance gets as many tokens as it sends.
    held = spec.experts // setup.ep
    chosen = setup.tokens * spec.experts_per_token
    yield from _feed_forward("mlp.experts", setup, chosen // held, spec.ffn // setup.tp, held)
    permuted = 1.0 * chosen * spec.dim * size
    yield from memory("mlp.permute", 6 * permuted, 6 * permuted)
    if spec.shared_experts:
        width = spec.shared_experts * spec.ffn // setup.tp
        yield from _feed_forward("mlp.shared", setup, setup.tokens, width, 1)


def _feed_forward(name: str, setup: Setup, rows: Number, width: Number, experts: Number) -> Iterator[Work]:
    spec, size = setup.spec, setup.precision.compute_bytes
    entrances = ("gate", "up") if spec.gated else ("up",)
    layers: dict[str, tuple[Number, Number]] = {f"{name}.{one}": (spec.dim, width) for one in entrances}
    layers[f"{name}.down"] = (width, spec.dim)
    yield from linears(setup, layers, rows, experts)
    hidden = 1.0 * size * experts * rows * width
    forward, backward = (5, 8) if spec.gated else (2, 3)  # gated: silu, 1 in, 1 out; times, 2 in, 1 out
    yield from memory(f"{name}.activation", forward * hidden, backward * hidden)


def _between(setup: Setup) -> Iterator[Work]:
    """Norms and residual additions."""
    stream = 1.0 * setup.tokens * setup.spec.dim * setup.precision.compute_bytes / setup.stream_split
    norms = 1 if setup.spec.parallel_block else 2
    yield from memory("norms", 2 * norms * stream, 4 * norms * stream)
    yield from memory("residual", 2 * 3 * stream, 2 * 2 * stream)
    if setup.spec.norm_after:
        yield from memory("norms.after", 2 * 2 * stream, 2 * 4 * stream)
