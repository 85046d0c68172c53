"""Self-attention: who may look at whom, and the layer that looks."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.models.packed import has_packed_kernel, packed_attention, row_boundaries
from fivefold.models.rope import rope_tables, rotate
from fivefold.models.spec import ModelSpec


class Context(NamedTuple):
    """What every block needs to know of a batch, worked out once per forward.

    rope        cos and sin, each [S, D/2] or [B, 1, S, D/2]; None with learned positions
    mask        [B or 1, 1, S, S] in the stream's dtype: 0 where a query (row) sees a key (column), else -inf
    boundaries  [N + 1] int32, where documents begin: in place of a mask, where there is a kernel for it

    With neither mask nor boundaries, attention is plain causal.
    """

    rope: tuple[Tensor, Tensor] | None
    mask: Tensor | None = None
    boundaries: Tensor | None = None


def places(tokens: Tensor, documents: Tensor | None) -> Tensor:
    """Where each token stands, counted from 0: in its sequence, [S], or in its document, [B, S].

    tokens     [B, S, ...]
    documents  [B, S] integers, equal inside a document, or None
    """
    index = torch.arange(tokens.shape[1], device=tokens.device)
    if documents is None:
        return index
    starts = documents != documents.roll(1, dims=1)
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def make_context(
    spec: ModelSpec,
    x: Tensor,
    positions: Tensor,
    documents: Tensor | None,
    boundaries: Tensor | None = None,
) -> Context:
    """The context of sequences whose tokens stand in order.

    x           [B, ..., dim], the residual stream: its device, dtype and number of rows count, not its length
    positions   [S] or [B, S] int64
    documents   [B, S] integers, equal inside a document; None when a sequence is one document
    boundaries  [N + 1] int32, where those documents begin: see `packed.packed_attention`
    """
    rope = None
    if spec.positions == "rope":
        rope = rope_tables(spec, positions, torch.promote_types(x.dtype, torch.float32))
    rows, length = x.shape[0], positions.shape[-1]
    if has_packed_kernel(x.device, x.dtype):
        if documents is None and spec.sliding_window is not None and spec.sliding_window < length:
            boundaries = row_boundaries(rows, length, x.device)
        if boundaries is not None:
            return Context(rope, boundaries=boundaries)
    visible = attention_mask(length, x.device, documents, spec.sliding_window)
    if visible is None:
        return Context(rope)
    # Attention adds such a mask as it is; of one that says yes or no it would make this in every layer.
    hidden = torch.zeros(visible.shape, dtype=x.dtype, device=x.device).masked_fill_(~visible, -math.inf)
    return Context(rope, hidden)


def attention_mask(
    length: int, device: torch.device, documents: Tensor | None, window: int | None
) -> Tensor | None:
    """Which key each query may see, [B or 1, 1, S, S] bool; None when plain causal attention says it all.

    documents  [B, S] integers or None
    """
    window = None if window is None or window >= length else window
    if documents is None and window is None:
        return None
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    visible = visible[None, None]
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    return visible


class AttentionCore(nn.Module):
    """Softmax attention alone, between the projections: no parameters, and easily replaced."""

    def __init__(self, window: int | None = None):
        super().__init__()
        self.window = window

    def forward(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """query [B, H, S, D]; key, value [B, K, S, D] with K dividing H. Returns [B, H, S, D]."""
        if context.boundaries is not None:
            return packed_attention(query, key, value, context.boundaries, self.window)
        repeats = query.shape[1] // key.shape[1]
        if context.mask is not None and query.device.type != "cpu":
            # A GPU's fast kernels that take a mask want as many key heads as query heads.
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            repeats = 1
        causal = context.mask is None
        return F.scaled_dot_product_attention(
            query, key, value, context.mask, is_causal=causal, enable_gqa=repeats > 1
        )


class Attention(nn.Module):
    """Multi-head attention, with fewer key and value heads where the spec says so (GQA, MQA)."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.head_dim = spec.head_dim
        query_dim, kv_dim = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.query = nn.Linear(spec.dim, query_dim, bias=spec.qkv_bias)
        self.key = nn.Linear(spec.dim, kv_dim, bias=spec.qkv_bias)
        self.value = nn.Linear(spec.dim, kv_dim, bias=spec.qkv_bias)
        self.output = nn.Linear(query_dim, spec.dim, bias=spec.attention_out_bias)
        self.query_norm = nn.RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.key_norm = nn.RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.core = AttentionCore(spec.sliding_window)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [B, S, dim] -> [B, S, dim]."""
        query, key, value = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rope is not None:
            query, key = rotate(query, *context.rope), rotate(key, *context.rope)
        mixed: Tensor = self.core(query, key, value, context)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * D] -> [B, heads, S, D]."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
