"""Attention over a sequence that several ranks hold in zigzag chunks (see `zigzag`), block by block.

Every rank attends with its own queries to the keys and values of one rank after the other, its own first, and
merges the results. The blocks come to it in one of two ways:

    ring       they travel from rank to rank; the next one is on its way while this one is worked on
    allgather  they are gathered at once

Backward lets the blocks come again rather than keep them. Their gradients travel on with them and come home
at the end, or are reduce-scattered. Each direction is one operator, to compilers and selective recomputation.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.axes.runtime.partial_attention import Block, accumulator, attend, attend_backward, merge
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


class Travelling:
    """Blocks of keys and values [2, B, K, T, D] that go around the ring, their gradients a step behind."""

    def __init__(self, key: Tensor, value: Tensor, group: dist.ProcessGroup):
        self.block, self.group = torch.stack((key, value)), group
        self.grad: Exchange | None = None

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """Each rank's number and its block, this rank's own first."""
        rank, ranks = self.group.rank(), self.group.size()
        block = self.block
        for step in range(ranks):
            coming = self._send_on(block) if step < ranks - 1 else None
            yield (rank - step) % ranks, block
            if coming is not None:
                block = coming.wait()

    def give(self, source: int, grad: Tensor) -> None:
        """Hand in this rank's part of the gradient of a block, in the order in which the blocks came."""
        if self.grad is not None:
            grad = grad + self.grad.wait()
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

    def __init__(self, key: Tensor, value: Tensor, group: dist.ProcessGroup):
        self.block, self.group = torch.stack((key, value)), group
        self.grads: dict[int, Tensor] = {}

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        rank, ranks = self.group.rank(), self.group.size()
        blocks = gathered(self.block[None], self.group)
        for step in range(ranks):
            source = (rank - step) % ranks
            yield source, blocks[source]

    def give(self, source: int, grad: Tensor) -> None:
        self.grads[source] = grad

    def mine(self) -> Tensor:
        return scattered(torch.stack([self.grads[rank] for rank in sorted(self.grads)]), self.group)[0]


BLOCKS: dict[str, type[Travelling | Gathered]] = {"ring": Travelling, "allgather": Gathered}


def _empty_result(query: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The result [B, H, T, D], a token's heads side by side: as the projection behind wants them."""
    rows, heads, length, width = query.shape
    out = query.new_empty((rows, length, heads, width), dtype=dtype).transpose(1, 2)
    return out, query.new_empty((rows, heads, length), dtype=accumulator(dtype))


def _part(
    rank: int, source: int, query: Tensor, block: Tensor, limits: list[Tensor]
) -> tuple[slice, slice, Block]:
    """Which of `rank`'s queries see which keys of `source`, and both together."""
    queries, keys, own = slice(None), slice(None), source == rank
    if not own:
        queries, keys = halves(rank, source, query.shape[2])
    key, value = block[:, :, :, keys].unbind()
    return queries, keys, Block(query[:, :, queries], key, value, own, limits[source] if limits else None)


@operator(lambda query, *_: _empty_result(query, query.dtype))
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, limits: list[Tensor], kind: str, group: str
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to the whole sequence.

    query    [B, H, T, D]; key, value [B, K, T, D]: this rank's T = S / ranks tokens
    limits   see `LocalContext`
    returns  the result [B, H, T, D] and its log-sum-exp [B, H, T]
    """
    ranks = group_named(group)
    out, lse = _empty_result(query, accumulator(query.dtype))
    out.fill_(0)
    lse.fill_(-math.inf)
    for source, block in BLOCKS[kind](key, value, ranks):
        queries, _, part = _part(ranks.rank(), source, query, block, limits)
        attended = attend(part)  # alive until the next block's is made, as the replay has it
        merge(out[:, :, queries], lse[:, :, queries], *attended)
    return out.to(query.dtype), lse


@operator(lambda grad, query, key, *_: (query.new_empty(query.shape), key.new_empty((2, *key.shape))))
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
) -> tuple[Tensor, Tensor]:
    """Gradients of the query [B, H, T, D], and of key and value in one [2, B, K, T, D], from the result's."""
    ranks = group_named(group)
    of_query = query.new_zeros(query.shape, dtype=accumulator(query.dtype))
    blocks = BLOCKS[kind](key, value, ranks)
    for source, block in blocks:
        queries, keys, part = _part(ranks.rank(), source, query, block, limits)
        grads = attend_backward(part, *(x[:, :, queries] for x in (grad, out, lse)))
        of_block = block.new_zeros(block.shape, dtype=of_query.dtype)
        of_query[:, :, queries] += grads[0]
        of_block[0, :, :, keys], of_block[1, :, :, keys] = grads[1:]
        blocks.give(source, of_block)
    return of_query.to(query.dtype), blocks.mine().to(key.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, limits, ctx.kind, ctx.group = inputs
    ctx.save_for_backward(query, key, value, *output, *limits)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, out, lse, *limits = ctx.saved_tensors
    of_query, of_block = ring_attention_backward(
        grad, query, key, value, out, lse, limits, ctx.kind, ctx.group
    )
    return (of_query, *of_block.unbind(), [None] * len(limits), None, None)


ring_attention.register_autograd(_backward, setup_context=_keep)
