"""Self-attention: who may look at whom, and the layer that looks."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.models.capped import capped_attention
from fivefold.models.norm import rms_norm
from fivefold.models.packed import has_packed_kernel, packed_attention, row_boundaries
from fivefold.models.rope import rope_tables, rotate
from fivefold.models.spec import ModelSpec


class Context(NamedTuple):
    """What every block needs to know of a batch, worked out once per forward.

    rope        cos and sin, each [S, D/2] or [B, 1, S, D/2]; None with learned positions
    mask        [B or 1, 1, S, S] in the stream's dtype: 0 where a query (row) sees a key (column), else -inf
    windowed    the same for layers with a sliding window; each is there if a layer of the model uses it
    boundaries  [N + 1] int32, where documents begin: in place of a mask, where there is a kernel for it
    starts      [B, S] int64, the first token of each token's document: in place of a mask under a soft cap

    With none of them, attention is plain causal.
    """

    rope: tuple[Tensor, Tensor] | None
    mask: Tensor | None = None
    windowed: Tensor | None = None
    boundaries: Tensor | None = None
    starts: Tensor | None = None


def places(tokens: Tensor, documents: Tensor | None) -> Tensor:
    """Where each token stands, counted from 0: in its sequence, [S], or in its document, [B, S].

    tokens     [B, S, ...]
    documents  [B, S] integers, equal inside a document, or None
    """
    index = torch.arange(tokens.shape[1], device=tokens.device)
    return index if documents is None else index - document_starts(documents)


def document_starts(documents: Tensor) -> Tensor:
    """Of each token, the first token of its document: [B, S] integers, equal inside a document -> int64."""
    index = torch.arange(documents.shape[1], device=documents.device)
    begins = documents != documents.roll(1, dims=1)
    return torch.where(begins, index, 0).cummax(dim=1).values


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
    if spec.attention_softcap is not None:
        return Context(rope, starts=None if documents is None else document_starts(documents))
    rows, length = x.shape[0], positions.shape[-1]
    if has_packed_kernel(x.device, x.dtype):
        if documents is None and spec.sliding_window is not None and spec.sliding_window < length:
            boundaries = row_boundaries(rows, length, x.device)
        if boundaries is not None:
            return Context(rope, boundaries=boundaries)
    masks = {
        window: _added_mask(attention_mask(length, x.device, documents, window), x.dtype)
        for window in {spec.window(layer) for layer in range(spec.layers)}
    }
    return Context(rope, masks.get(None), masks.get(spec.sliding_window))


def _added_mask(visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Attention adds such a mask as it is; of one that says yes or no it would make this in every layer."""
    if visible is None:
        return None
    hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return hidden.masked_fill_(~visible, -math.inf)


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

    def __init__(self, window: int | None = None, softcap: float | None = None):
        super().__init__()
        self.window, self.softcap = window, softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """query [B, H, S, D]; key, value [B, K, S, D] with K dividing H. Returns [B, H, S, D]."""
        if self.softcap is not None:
            mixed: Tensor
            mixed, _ = capped_attention(query, key, value, context.starts, self.window, self.softcap)
            return mixed
        if context.boundaries is not None:
            return packed_attention(query, key, value, context.boundaries, self.window)
        repeats = query.shape[1] // key.shape[1]
        mask = context.mask if self.window is None else context.windowed
        if mask is not None and query.device.type != "cpu":
            # A GPU's fast kernels that take a mask want as many key heads as query heads.
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            repeats = 1
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=repeats > 1
        )


class Attention(nn.Module):
    """Multi-head attention, with fewer key and value heads where the spec says so (GQA, MQA)."""

    def __init__(self, spec: ModelSpec, layer: int):
        super().__init__()
        self.head_dim, self.query_factor = spec.head_dim, spec.query_factor
        query_dim, kv_dim = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.query = nn.Linear(spec.dim, query_dim, bias=spec.qkv_bias)
        self.key = nn.Linear(spec.dim, kv_dim, bias=spec.qkv_bias)
        self.value = nn.Linear(spec.dim, kv_dim, bias=spec.qkv_bias)
        self.output = nn.Linear(query_dim, spec.dim, bias=spec.attention_out_bias)
        self.query_norm = rms_norm(spec, spec.head_dim) if spec.qk_norm else None
        self.key_norm = rms_norm(spec, spec.head_dim) if spec.qk_norm else None
        self.core = AttentionCore(spec.window(layer), spec.attention_softcap)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [B, S, dim] -> [B, S, dim]."""
        query, key, value = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rope is not None:
            query, key = rotate(query, *context.rope), rotate(key, *context.rope)
        if self.query_factor != 1:
            query = query * self.query_factor
        mixed: Tensor = self.core(query, key, value, context)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * D] -> [B, heads, S, D]."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
