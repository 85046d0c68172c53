"""The decoder: embedding, blocks, head."""

import math
from typing import Self

import torch
from torch import Tensor, nn
from torch.types import Device

from fivefold.models.attention import Attention, Context, make_context, places
from fivefold.models.chunked_loss import chunked_loss, cross_entropy
from fivefold.models.loss import summed_cross_entropy
from fivefold.models.mlp import Mlp
from fivefold.models.moe import Moe
from fivefold.models.norm import soft_cap, stream_norm
from fivefold.models.spec import ModelSpec


class Decoder(nn.Module):
    """A decoder-only transformer. Its weights mean nothing until `initialise` or a checkpoint fills them.

    `embedding` or `head` may be taken away (set to None): the model then takes hidden states [B, S, dim] in
    place of tokens, or returns them in place of logits. `blocks` is keyed by the layer's number, so that a
    model with some of them keeps their names. `make_context` and `run_blocks` may be replaced on an instance.
    """

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.embedding: Embedding | None = Embedding(spec)
        self.blocks = nn.ModuleDict({str(layer): Block(spec, layer) for layer in range(spec.layers)})
        self.head: Head | None = Head(spec)
        self._tie()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        boundaries: Tensor | None = None,
    ) -> Tensor:
        """tokens     [B, S] int64
        targets    [B, S] int64, -100 where nothing is to be predicted
        documents  [B, S] integers, equal inside a document: tokens see only their own document
        positions  [S] or [B, S] int64; by default a token's place in its document
        boundaries [N + 1] int32, where those documents begin: lets a GPU do without a mask
        returns    logits [B, S, V], or with targets the summed cross entropy, a scalar
        """
        if positions is None:
            positions = places(tokens, documents)
        x = tokens if self.embedding is None else self.embedding(tokens, positions)
        x = self.run_blocks(x, self.make_context(x, positions, documents, boundaries))
        return x if self.head is None else self.head(x, targets)

    def make_context(
        self, x: Tensor, positions: Tensor, documents: Tensor | None, boundaries: Tensor | None
    ) -> Context:
        """What every block needs to know of this batch: see `attention.make_context`."""
        return make_context(self.spec, x, positions, documents, boundaries)

    def run_blocks(self, x: Tensor, context: Context) -> Tensor:
        """x [B, S, dim] -> [B, S, dim]."""
        for block in self.blocks.values():
            x = self.run_block(block, x, context)
        return x

    def run_block(self, block: nn.Module, x: Tensor, context: Context) -> Tensor:
        """x [B, S, dim] -> [B, S, dim]."""
        y: Tensor = block(x, context)
        return y

    def _tie(self) -> None:
        if self.spec.tied and self.embedding is not None and self.head is not None:
            self.head.output.weight = self.embedding.tokens.weight

    def to_empty(self, *, device: Device, recurse: bool = True) -> Self:
        """As torch's, which alone would give each place of a tied weight a parameter of its own.

        What is not a parameter gets no initial values, and starts from zero.
        """
        super().to_empty(device=device, recurse=recurse)
        self._tie()
        for module in self.modules():
            if isinstance(module, Moe):
                module.forget()
        return self


class Embedding(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.tokens = nn.Embedding(spec.vocab_size, spec.dim)
        learned = spec.positions == "learned"
        self.positions = nn.Embedding(spec.max_seq_len, spec.dim) if learned else None
        self.scale = math.sqrt(spec.dim) if spec.scale_embedding else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [B, S], positions [S] or [B, S] -> residual stream [B, S, dim], of the weights' dtype."""
        x: Tensor = self.tokens(tokens)
        if self.scale is not None:
            # A tensor, so that it is rounded as the weights are: released models were trained with that.
            x = x * torch.tensor(self.scale, dtype=x.dtype)
        return x if self.positions is None else x + self.positions(positions)


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int):
        super().__init__()
        self.attention_norm = stream_norm(spec)
        self.attention = Attention(spec, layer)
        self.attention_out_norm = stream_norm(spec) if spec.norm_after else None
        self.mlp_norm = None if spec.parallel_block else stream_norm(spec)
        self.mlp = Mlp(spec) if spec.experts is None else Moe(spec)
        self.mlp_out_norm = stream_norm(spec) if spec.norm_after else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [B, S, dim] -> [B, S, dim]."""
        normed = self.attention_norm(x)
        attended = _normed(self.attention_out_norm, self.attention(normed, context))
        if self.mlp_norm is None:
            added = _normed(self.mlp_out_norm, self.mlp(normed))
            return x + attended + added
        x = x + attended
        added = _normed(self.mlp_out_norm, self.mlp(self.mlp_norm(x)))
        return x + added


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class Head(nn.Module):
    """`loss_chunk`: how many tokens' logits the loss has at a time; 0: all."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.norm = stream_norm(spec)
        self.output = nn.Linear(spec.dim, spec.vocab_size, bias=False)
        self.softcap = spec.final_softcap
        self.loss_chunk = 0

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """x [B, S, dim], targets [B, S] or None -> logits [B, S, V], or the summed loss, a scalar."""
        if targets is not None and self.loss_chunk:
            return chunked_loss(self.norm(x), self.output.weight, targets, self.loss_chunk, self.of_chunk)
        logits: Tensor = self.output(self.norm(x))
        if self.softcap is not None:
            logits = soft_cap(logits, self.softcap)
        return logits if targets is None else summed_cross_entropy(logits, targets)

    def of_chunk(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What is computed of a chunk's logits [tokens, V]: see `chunked_loss.OfChunk`."""
        return cross_entropy(logits, targets, self.softcap)
