"""Attention of queries to one block of keys, by kernels that also say how much the block counts.

Each block gives its own result and the log-sum-exp of its scores, by which `merging` weighs the results.
Backward goes block by block too, given the whole result and its log-sum-exp. What a kernel gives is handed on
in the numbers and the order in memory in which it comes.

Which pairs of a block are visible is one of two kinds, and never a mask of queries times keys:

    causal   queries and keys are the same tokens. `limits` [N + 1] says where documents begin, as in
             `models.packed`; None: every row is one document.
    full     all keys come before all queries. At most one document of a row reaches from the keys into the
             queries, so what is visible is a rectangle: the first queries times the last keys. `limits`
             [B, 2] says how many of each; None: all.

On a CUDA GPU 16-bit numbers without limits go through cuDNN's kernel, where torch's own attention would;
with limits, through the flash kernel for sequences of many lengths, all rectangles in one launch. On a CPU,
torch's flash kernel runs once for each rectangle. Other numbers on a GPU have no such kernel: they are worked
out in tiles of queries.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.axes.runtime.merging import accumulator
from fivefold.comm import compat
from fivefold.models.packed import has_packed_kernel, row_boundaries

TILE = 256
"""Queries at a time where there is no kernel."""

Grads = tuple[Tensor, Tensor, Tensor]


class Block(NamedTuple):
    """Queries, a block of keys and values, and which of them see each other.

    query       [B, H, Q, D]
    key, value  [B, K, T, D] with K dividing H
    """

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    limits: Tensor | None


def attend(block: Block) -> tuple[Tensor, Tensor]:
    """The result [B, H, Q, D], of the query's dtype or wider, and its log-sum-exp [B, H, Q], of the
    accumulator's; 0 and minus infinity for a query that sees nothing.
    """
    query, key, value, causal, limits = block
    if _has_cudnn(block):
        return compat.cudnn_attention(query, key, value, causal)
    if _has_flash(query):
        return _flash(block)
    key, value = _repeated(query, key), _repeated(query, value)
    kernel = compat.cpu_attention if query.device.type == "cpu" else _in_tiles
    if limits is None:
        return kernel(query, key, value, causal)
    wide = accumulator(query.dtype)
    out = query.new_zeros(query.shape, dtype=wide)
    lse = query.new_full(query.shape[:-1], -math.inf, dtype=wide)
    for rows, queries, keys in _rectangles(block):
        part = kernel(query[rows, :, queries], key[rows, :, keys], value[rows, :, keys], causal)
        out[rows, :, queries], lse[rows, :, queries] = part
    return out, lse


def attend_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Grads:
    """The block's part of the gradients of query, key and value, of their dtype or wider.

    grad, out  [B, H, Q, D], and lse [B, H, Q]: of the whole attention, over all blocks; for the same query,
               key and value always in the same order in memory (see `compat.cudnn_attention_backward`)
    """
    query, key, value, causal, limits = block
    if _has_cudnn(block):
        return compat.cudnn_attention_backward(grad, query, key, value, out, lse.contiguous(), causal)
    if _has_flash(query):
        return _flash_backward(block, grad, out, lse)
    wide, groups = accumulator(query.dtype), key.shape[1]
    key, value = _repeated(query, key), _repeated(query, value)
    kernel = compat.cpu_attention_backward if query.device.type == "cpu" else _in_tiles_backward
    grads: tuple[Tensor, ...]
    if limits is None:
        grads = kernel(grad, query, key, value, out, lse, causal)
    else:
        grads = tuple(x.new_zeros(x.shape, dtype=wide) for x in (query, key, value))
        for rows, queries, keys in _rectangles(block):
            g, q, o, weight = (x[rows, :, queries] for x in (grad, query, out, lse))
            part = kernel(g, q, key[rows, :, keys], value[rows, :, keys], o, weight, causal)
            for whole, piece, place in zip(grads, part, (queries, keys, keys), strict=True):
                whole[rows, :, place] = piece
    of_query, of_key, of_value = grads
    if groups < query.shape[1]:
        of_key, of_value = (x.unflatten(1, (groups, -1)).sum(2, dtype=wide) for x in (of_key, of_value))
    return of_query, of_key, of_value


def _repeated(query: Tensor, key: Tensor) -> Tensor:
    """A key head for every query head."""
    repeats = query.shape[1] // key.shape[1]
    return key if repeats == 1 else key.repeat_interleave(repeats, 1)


def _rectangles(block: Block) -> Iterator[tuple[slice, slice, slice]]:
    """Rows, queries and keys of each part in which all that a kernel is given is visible, causal or full."""
    length, keys, limits = block.query.shape[2], block.key.shape[2], block.limits
    assert limits is not None
    if block.causal:
        for begin, end in pairwise(limits.tolist()):
            if begin < end:
                row, place = divmod(begin, length)
                document = slice(place, place + end - begin)
                yield slice(row, row + 1), document, document
    else:
        for row, (first_queries, last_keys) in enumerate(limits.tolist()):
            if first_queries:
                yield slice(row, row + 1), slice(0, first_queries), slice(keys - last_keys, keys)


# --- one rectangle at a time -------------------------------------------------------------------------------


def _in_tiles(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    wide = accumulator(query.dtype)
    key, value = key.to(wide), value.to(wide)
    parts = []
    for begin in range(0, query.shape[2], TILE):
        scores = _scores(query[:, :, begin : begin + TILE].to(wide), key, begin if causal else None)
        lse = scores.logsumexp(-1)
        parts.append(((scores - lse[..., None]).exp_() @ value, lse))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _in_tiles_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Grads:
    wide = accumulator(query.dtype)
    key, value = key.to(wide), value.to(wide)
    scale = 1 / math.sqrt(query.shape[-1])
    of_query = torch.empty_like(query, dtype=wide)
    of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
    for begin in range(0, query.shape[2], TILE):
        tile = slice(begin, begin + TILE)
        g, q, o = (x[:, :, tile].to(wide) for x in (grad, query, out))
        weights = (_scores(q, key, begin if causal else None) - lse[:, :, tile, None]).exp_()
        of_value += weights.transpose(-1, -2) @ g
        of_scores = weights * (g @ value.transpose(-1, -2) - (g * o).sum(-1, keepdim=True)) * scale
        of_query[:, :, tile] = of_scores @ key
        of_key += of_scores.transpose(-1, -2) @ q
    return of_query, of_key, of_value


def _scores(query: Tensor, key: Tensor, begin: int | None) -> Tensor:
    """Scaled scores of a tile of queries; with `begin`, its place among the keys, causal ones."""
    scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]))
    if begin is not None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(begin + 1)
        scores = scores.masked_fill_(hidden, -math.inf)
    return scores


# --- all rectangles in one launch --------------------------------------------------------------------------
#
# The kernel takes tokens [B * Q, H, D] and where its sequences begin among queries and among keys. What is
# not visible becomes sequences without keys, or without queries; what it leaves there is put right after.


def _has_cudnn(block: Block) -> bool:
    return block.limits is None and compat.has_cudnn_attention(*block[:3])


def _has_flash(query: Tensor) -> bool:
    width = query.shape[-1]
    return has_packed_kernel(query.device, query.dtype) and width % 8 == 0 and width <= 256


def _flash(block: Block) -> tuple[Tensor, Tensor]:
    rows, length, keys = block.query.shape[0], block.query.shape[2], block.key.shape[2]
    tokens = (_flat(block.query), _flat(block.key), _flat(block.value))
    out, lse = compat.gpu_attention(*tokens, *_sequences(block), (length, keys), block.causal)
    out = _rows(out, rows)
    lse = lse.unflatten(1, (rows, length)).transpose(0, 1).contiguous()
    if block.causal or block.limits is None:
        return out, lse
    seen = _first(length, block.limits[:, 0])
    return out.where(seen[..., None], 0), lse.where(seen, -math.inf)


def _flash_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Grads:
    rows, length, keys = block.query.shape[0], block.query.shape[2], block.key.shape[2]
    tokens = (_flat(grad), _flat(block.query), _flat(block.key), _flat(block.value), _flat(out))
    flat_lse = lse.transpose(0, 1).flatten(1).contiguous()
    parts = compat.gpu_attention_backward(*tokens, flat_lse, *_sequences(block), (length, keys), block.causal)
    of_query, of_key, of_value = (_rows(part, rows) for part in parts)
    if block.causal or block.limits is None:
        return of_query, of_key, of_value
    seen = _first(length, block.limits[:, 0])[..., None]
    looked_at = ~_first(keys, keys - block.limits[:, 1])[..., None]
    return of_query.where(seen, 0), of_key.where(looked_at, 0), of_value.where(looked_at, 0)


def _sequences(block: Block) -> tuple[Tensor, Tensor]:
    """Where the kernel's sequences begin among the queries and among the keys, each [N + 1] int32."""
    query, limits = block.query, block.limits
    rows, length, keys = query.shape[0], query.shape[2], block.key.shape[2]
    if limits is None:
        return row_boundaries(rows, length, query.device), row_boundaries(rows, keys, query.device)
    if block.causal:
        return limits, limits
    first, last = limits.unbind(1)
    nothing = torch.zeros_like(first)
    # In each row: keys that no query sees, the rectangle, queries that see nothing.
    of_queries = torch.stack([nothing, first, length - first], 1).flatten()
    of_keys = torch.stack([keys - last, last, nothing], 1).flatten()
    return _begins(of_queries), _begins(of_keys)


def _begins(lengths: Tensor) -> Tensor:
    """[N] lengths -> [N + 1] int32: where each begins, and where the last ends."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _first(length: int, counts: Tensor) -> Tensor:
    """counts [B] -> [B, 1, length] bool: true for as many of the first places of each row."""
    places = torch.arange(length, device=counts.device)
    return (places < counts[:, None])[:, None]


def _flat(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B * T, H, D]."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _rows(x: Tensor, rows: int) -> Tensor:
    """[B * T, H, D] -> [B, H, T, D]."""
    return x.view(rows, -1, *x.shape[1:]).transpose(1, 2)
