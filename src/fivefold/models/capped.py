"""Causal attention whose scores are soft-capped: score becomes cap * tanh(score / cap). (Gemma 2)

Torch's attention kernels have no cap, so this is put together from matrix products, for one tile of queries
after the other: memory grows with the length of a sequence, not with its square. Backward makes the scores
of a tile again, from the log-sum-exp that forward keeps. Keys that no query of a tile sees are left out.

It is one operator to compilers and to selective recomputation, which keeps its result.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.models.spec import QUERY_TILE
from fivefold.operators import operator


class Tile(NamedTuple):
    """Some queries, the keys that any of them sees, and which of those each does not: [B or 1, 1, Q, T]."""

    queries: slice
    keys: slice
    hidden: Tensor


def _tiles(query: Tensor, starts: Tensor | None, window: int | None) -> Iterator[Tile]:
    length = query.shape[2]
    index = torch.arange(length, device=query.device)
    for begin in range(0, length, QUERY_TILE):
        end = min(begin + QUERY_TILE, length)
        first = 0 if window is None else max(0, begin + 1 - window)
        rows, columns = index[begin:end, None], index[first:end]
        hidden = columns > rows
        if window is not None:
            hidden |= columns <= rows - window
        hidden = hidden[None, None]
        if starts is not None:
            hidden = hidden | (columns < starts[:, None, begin:end, None])
        yield Tile(slice(begin, end), slice(first, end), hidden)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[B, H, Q, D] -> [B * K, H/K * Q, D]: the queries that share a key head, one under the other."""
    rows: Tensor = x.unflatten(1, (groups, -1)).flatten(2, 3).flatten(0, 1)
    return rows


def _capped(query: Tensor, key: Tensor, heads: int, cap: float) -> Tensor:
    """tanh(score / cap) of a tile, in float32 or wider: [B, H, Q, T].

    query  [B * K, H/K * Q, D], as `_grouped` makes it
    key    [B, K, T, D]
    """
    scores = torch.bmm(query, key.flatten(0, 1).transpose(1, 2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.mul_(1 / (math.sqrt(query.shape[-1]) * cap)).tanh_()
    return scores.view(key.shape[0], heads, -1, key.shape[2])


def _like_result(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=wide)


@operator(_like_result)
def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, window: int | None, cap: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention, scores divided by sqrt(D) and then capped.

    query    [B, H, S, D]; key, value [B, K, S, D] with K dividing H
    starts   [B, S] int64, the first token of each token's document; None where a row is one document
    window   how many tokens a query sees, itself included; None: all before it
    returns  the result [B, H, S, D], and the log-sum-exp of the capped scores [B, H, S], in float32 or wider
    """
    out, lse = _like_result(query)
    heads, groups = query.shape[1], key.shape[1]
    for queries, keys, hidden in _tiles(query, starts, window):
        tile = _grouped(query[:, :, queries], groups)
        weights = _capped(tile, key[:, :, keys], heads, cap).mul_(cap).masked_fill_(hidden, -math.inf)
        largest = weights.amax(-1, keepdim=True)
        weights = weights.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        lse[:, :, queries] = (largest + total.log())[..., 0]
        weights = weights.div_(total).to(query.dtype)
        mixed = torch.bmm(_grouped(weights, groups), value[:, :, keys].flatten(0, 1))
        out[:, :, queries] = mixed.view(out[:, :, queries].shape)
    return out, lse


def _like_gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in (query, key, value)]


@operator(_like_gradients)
def capped_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    window: int | None,
    cap: float,
) -> list[Tensor]:
    """Gradients of query [B, H, S, D], key and value [B, K, S, D], from that of the result [B, H, S, D]."""
    heads, groups, scale = query.shape[1], key.shape[1], 1 / math.sqrt(query.shape[-1])
    of_query = torch.empty_like(query)
    of_key, of_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (key, value))
    for queries, keys, hidden in _tiles(query, starts, window):
        tile, grads = (_grouped(x[:, :, queries], groups) for x in (query, grad))
        tanh = _capped(tile, key[:, :, keys], heads, cap)
        weights = (tanh * cap).masked_fill_(hidden, -math.inf).sub_(lse[:, :, queries, None]).exp_()
        narrow = _grouped(weights.to(query.dtype), groups)
        of_value[:, :, keys] += _ungrouped(torch.bmm(narrow.transpose(1, 2), grads), groups)
        of_weights = torch.bmm(grads, value[:, :, keys].flatten(0, 1).transpose(1, 2)).view(weights.shape)
        own = (grad[:, :, queries].to(lse.dtype) * out[:, :, queries]).sum(-1, keepdim=True)
        # The gradient of a score is weight * (the weight's gradient - own); before the cap, 1 - tanh^2 of it.
        of_scores = weights.mul_(of_weights.to(lse.dtype).sub_(own)).mul_(tanh.square_().neg_().add_(1))
        narrow = _grouped(of_scores.mul_(scale).to(query.dtype), groups)
        of_query[:, :, queries] = torch.bmm(narrow, key[:, :, keys].flatten(0, 1)).view(
            of_query[:, :, queries].shape
        )
        of_key[:, :, keys] += _ungrouped(torch.bmm(narrow.transpose(1, 2), tile), groups)
    return [of_query, of_key.to(key.dtype), of_value.to(value.dtype)]


def _ungrouped(x: Tensor, groups: int) -> Tensor:
    """[B * K, T, D] -> [B, K, T, D]."""
    apart: Tensor = x.unflatten(0, (-1, groups))
    return apart


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, ctx.window, ctx.cap = inputs
    ctx.save_for_backward(query, key, value, *output, starts)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    grads = capped_attention_backward(grad, *ctx.saved_tensors, ctx.window, ctx.cap)
    return *grads, None, None, None


capped_attention.register_autograd(_backward, setup_context=_keep)
