"""Attention over a sequence that several ranks hold in zigzag chunks (see `zigzag`), block by block.

Every rank attends with its own queries to its own keys and values and to those of the other ranks, and puts
the results together (see `merging`). The others' come to it in one of two ways:

    ring       they travel from rank to rank; the next one is on its way while this one is worked on
    allgather  they are gathered at once, and worked on in two blocks: those of earlier and of later ranks

Backward lets the blocks come again rather than keep them. Their gradients travel on with them and come home
at the end, or are reduce-scattered. Each direction is one operator, to compilers and selective recomputation.

A block is [T, 2, B, K, D]: a token's keys and values lie together. So the first tokens of a block, and the
blocks of neighbouring ranks, are one run of memory, and the kernels take them as they are.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.axes.runtime.merging import Part, Parts, accumulator
from fivefold.axes.runtime.partial_attention import Block, attend, attend_backward
from fivefold.axes.runtime.zigzag import halves
from fivefold.comm.collectives import gathered, scattered
from fivefold.comm.compat import group_named
from fivefold.comm.point_to_point import Exchange
from fivefold.operators import operator


class LocalContext(NamedTuple):
    """As `models.attention.Context`, for the tokens of one rank.

    limits  what they see of each rank's keys, as `partial_attention` has it: of their own
            `zigzag.local_boundaries`, of another's `zigzag.visible_counts`; none where a row is one document
    """

    rope: tuple[Tensor, Tensor] | None
    limits: list[Tensor]


class RingCore(nn.Module):
    """In place of `AttentionCore`, on the tokens of this rank."""

    def __init__(self, group: dist.ProcessGroup, kind: str):
        super().__init__()
        self.group, self.kind = group.group_name, kind

    def forward(self, query: Tensor, key: Tensor, value: Tensor, context: LocalContext) -> Tensor:
        """query [B, H, S/cp, D]; key, value [B, K, S/cp, D] with K dividing H. Returns [B, H, S/cp, D]."""
        out, _ = ring_attention(query, key, value, context.limits, self.kind, self.group)
        return out  # type: ignore[no-any-return]


class Piece(NamedTuple):
    """The keys of neighbouring ranks that some of this rank's queries see.

    ranks    whose keys: this rank's own, which are seen causally, or others', which are seen whole
    queries  which of this rank's queries see them, the last of them among these
    keys     which of each rank's keys are seen, the first of them among these
    limits   see `LocalContext`
    """

    ranks: range
    queries: slice
    keys: slice
    limits: Tensor | None

    @classmethod
    def of(cls, ranks: range, rank: int, length: int, limits: list[Tensor]) -> "Piece":
        """What `rank` sees of some ranks, all before it or all after it; each holds `length` tokens."""
        source = ranks[0]
        whole = slice(0, length)
        queries, keys = (whole, whole) if source == rank else halves(rank, source, length)
        return cls(ranks, queries, keys, limits[source] if limits else None)

    def among(self, query: Tensor, blocks: Tensor, rank: int) -> Block:
        """query [B, H, Q, D], those of this piece; blocks [ranks, T, 2, B, K, D]."""
        key, value = blocks[:, self.keys].flatten(0, 1).permute(1, 2, 3, 0, 4).unbind()
        return Block(query, key, value, self.ranks[0] == rank, self.limits)


def _block(key: Tensor, value: Tensor) -> Tensor:
    """key, value [B, K, T, D] -> [T, 2, B, K, D]."""
    return torch.stack((key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)), 1)


def _keys_and_values(blocks: Tensor) -> tuple[Tensor, ...]:
    """[ranks, T, 2, B, K, D] -> keys and values where they lie, [B, K, ranks, T, D] each."""
    return blocks.permute(2, 3, 4, 0, 1, 5).unbind()


def _put(parts: tuple[Tensor, Tensor], blocks: Tensor, onto: bool) -> None:
    """Parts of keys and of values [B, K, ranks * T, D] into blocks, or onto what is there."""
    for part, place in zip(parts, _keys_and_values(blocks), strict=True):
        part = part.unflatten(2, place.shape[2:4])
        place.add_(part) if onto else place.copy_(part)


class Travelling:
    """Blocks that go around the ring, their gradients a step behind."""

    def __init__(self, key: Tensor, value: Tensor, limits: list[Tensor], group: dist.ProcessGroup):
        self.block, self.limits, self.group = _block(key, value), limits, group
        self.grad: Exchange | None = None

    def __iter__(self) -> Iterator[tuple[Piece, Tensor]]:
        """The pieces, this rank's own first, and the blocks they are of."""
        rank, ranks, length = self.group.rank(), self.group.size(), len(self.block)
        block = self.block
        for step in range(ranks):
            coming = self._send_on(block) if step < ranks - 1 else None
            source = (rank - step) % ranks
            yield Piece.of(range(source, source + 1), rank, length, self.limits), block[None]
            if coming is not None:
                block = coming.wait()

    def give(self, piece: Piece, parts: tuple[Tensor, Tensor]) -> None:
        """Hand in this rank's part of the gradient of a piece, in the order in which the pieces came."""
        if self.grad is None:
            grad = torch.empty_like(self.block, dtype=accumulator(self.block.dtype))
        else:
            grad = self.grad.wait()
        _put(parts, grad[None, piece.keys], onto=self.grad is not None)
        self.grad = self._send_on(grad)

    def mine(self) -> Tensor:
        """The gradient of this rank's own block, all parts added up."""
        assert self.grad is not None
        return self.grad.wait()

    def _send_on(self, x: Tensor) -> Exchange:
        rank, ranks = self.group.rank(), self.group.size()
        return Exchange(x, self.group, to=(rank + 1) % ranks, source=(rank - 1) % ranks)


class Gathered:
    """The same, but blocks are gathered at once, and gradients are reduce-scattered."""

    def __init__(self, key: Tensor, value: Tensor, limits: list[Tensor], group: dist.ProcessGroup):
        self.block, self.limits, self.group = _block(key, value), limits, group
        self.grads: Tensor | None = None

    def __iter__(self) -> Iterator[tuple[Piece, Tensor]]:
        rank, ranks, length = self.group.rank(), self.group.size(), len(self.block)
        blocks = gathered(self.block, self.group).unflatten(0, (ranks, length))
        others: tuple[range, ...] = (range(rank), range(rank + 1, ranks))
        if self.limits:  # which differ from rank to rank
            others = tuple(range(one, one + 1) for some in others for one in some)
        for some in (range(rank, rank + 1), *others):
            if some:
                yield Piece.of(some, rank, length, self.limits), blocks[some.start : some.stop]

    def give(self, piece: Piece, parts: tuple[Tensor, Tensor]) -> None:
        rank, ranks = self.group.rank(), self.group.size()
        if self.grads is None:
            dtype = accumulator(self.block.dtype)
            self.grads = self.block.new_empty((ranks, *self.block.shape), dtype=dtype)
            self.grads[:rank, len(self.block) // 2 :] = 0  # of the keys that are not seen
        _put(parts, self.grads[piece.ranks.start : piece.ranks.stop, piece.keys], onto=False)

    def mine(self) -> Tensor:
        assert self.grads is not None
        return scattered(self.grads.flatten(0, 1), self.group)


BLOCKS: dict[str, type[Travelling | Gathered]] = {"ring": Travelling, "allgather": Gathered}


def _by_token(x: Tensor) -> Tensor:
    """Empty, like `x` [B, H, T, D], a token's heads side by side: as the projections around want them."""
    rows, heads, length, width = x.shape
    return x.new_empty((rows, length, heads, width)).transpose(1, 2)


def _empty_result(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The result [B, H, T, D] and its log-sum-exp."""
    return _by_token(query), query.new_empty(query.shape[:-1], dtype=accumulator(query.dtype))


@operator(_empty_result)
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, limits: list[Tensor], kind: str, group: str
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to the whole sequence.

    query    [B, H, T, D]; key, value [B, K, T, D]: this rank's T = S / ranks tokens
    limits   see `LocalContext`
    returns  the result [B, H, T, D] and its log-sum-exp [B, H, T]
    """
    ranks, parts = group_named(group), Parts()
    for piece, blocks in BLOCKS[kind](key, value, limits, ranks):
        block = piece.among(query[:, :, piece.queries], blocks, ranks.rank())
        parts.add(Part(piece.queries.start, *attend(block)))
    out = _by_token(query)
    lse = parts.put_into(out)
    assert lse is not None
    return out, lse


@operator(lambda grad, query, key, value, *_: tuple(_by_token(x) for x in (query, key, value)))
def ring_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    limits: list[Tensor],
    kind: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query [B, H, T, D], key and value [B, K, T, D], from the result's."""
    ranks, parts = group_named(group), Parts()
    if grad.stride() != out.stride():  # always the same order: see `attend_backward`
        grad = torch.empty_like(out).copy_(grad)
    blocks = BLOCKS[kind](key, value, limits, ranks)
    for piece, here in blocks:
        some_grad, some_query, some_out, some_lse = (x[:, :, piece.queries] for x in (grad, query, out, lse))
        block = piece.among(some_query, here, ranks.rank())
        of_query, of_key, of_value = attend_backward(block, some_grad, some_out, some_lse)
        blocks.give(piece, (of_key, of_value))
        parts.add(Part(piece.queries.start, of_query))
    of_query, of_key, of_value = (_by_token(x) for x in (query, key, value))
    parts.put_into(of_query)  # while the last gradients are on their way
    for result, place in zip((of_key, of_value), _keys_and_values(blocks.mine()[None]), strict=True):
        result.copy_(place[:, :, 0])
    return of_query, of_key, of_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, limits, ctx.kind, ctx.group = inputs
    ctx.save_for_backward(query, key, value, *output, *limits)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, out, lse, *limits = ctx.saved_tensors
    found = ring_attention_backward(grad, query, key, value, out, lse, limits, ctx.kind, ctx.group)
    return (*found, [None] * len(limits), None, None)


ring_attention.register_autograd(_backward, setup_context=_keep)
