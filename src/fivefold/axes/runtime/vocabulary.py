"""The two ends of a model whose vocabulary tp ranks share: token embedding, logits and loss.

Each rank has the tokens from `first` on, as many as its part of the matrix has rows.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.axes.runtime.tensor_layers import LocalLayer, Stream
from fivefold.comm.collectives import Group, all_gather, summed
from fivefold.comm.compat import detachable
from fivefold.models.chunked_loss import chunked_loss, cross_entropy, own
from fivefold.models.decoder import Head
from fivefold.models.loss import IGNORED
from fivefold.models.norm import soft_cap


def first_token(vocabulary: int, stream: Stream) -> int:
    """The first token of this rank: ranks have ceil(V / ranks) tokens each, the last one what is left."""
    return math.ceil(vocabulary / stream.ranks) * stream.rank


def look_up(stream: Stream, first: int, tokens: Tensor, weight: Tensor, bias: None) -> Tensor:
    """tokens [B, S] -> the stream's part of [B, S, dim]: each rank adds the rows of the tokens it has."""
    rows, mine = own(tokens, first, weight.shape[0])
    # FSDP warns of modules that return a view.
    return detachable(stream.leave(F.embedding(rows, weight) * mine[..., None]))


class VocabularyHead(nn.Module):
    """The last norm, this rank's logits, and the loss over all of them."""

    def __init__(self, head: Head, stream: Stream, vocabulary: int):
        super().__init__()
        self.norm, self.output, self.softcap = head.norm, cast(LocalLayer, head.output), head.softcap
        self.stream, self.vocabulary, self.loss_chunk = stream, vocabulary, head.loss_chunk

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """x the stream's part of [B, S, dim], targets [B, S] or None -> all logits [B, S, V], or the summed
        loss, a scalar that is the same on every rank.
        """
        if targets is not None and self.loss_chunk:
            weight, _ = self.output.used_parts()
            return chunked_loss(self.norm(x), weight, targets, self.loss_chunk, self.of_chunk)
        logits: Tensor = self.output(self.norm(x))
        if self.softcap is not None:
            logits = soft_cap(logits, self.softcap)
        group = self.stream.group
        if targets is not None:
            return summed_cross_entropy(logits, targets, first_token(self.vocabulary, self.stream), group)
        missing = math.ceil(self.vocabulary / self.stream.ranks) - logits.shape[-1]
        return all_gather(F.pad(logits, (0, missing)), group, dim=-1)[..., : self.vocabulary]

    def of_chunk(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of this rank's part of a chunk's logits, [tokens, this rank's]: see `chunked_loss.OfChunk`."""
        first = first_token(self.vocabulary, self.stream)
        return cross_entropy(logits, targets, self.softcap, first, self._across)

    def _across(self, x: Tensor, operation: str) -> Tensor:
        return summed(x, self.stream.group, operation)


def summed_cross_entropy(logits: Tensor, targets: Tensor, first: int, group: Group) -> Tensor:
    """`models.loss.summed_cross_entropy` of logits that are spread over ranks.

    logits   [..., this rank's tokens], computed in float32, or float64 where they are
    targets  [...] int64, of the whole vocabulary, -100 where nothing is to be predicted
    first    this rank's first token
    returns  scalar, float32 or float64, the same on every rank
    """
    loss: Tensor = _SummedCrossEntropy.apply(logits, targets, first, group)  # type: ignore[no-untyped-call]
    return loss


class _SummedCrossEntropy(torch.autograd.Function):
    """Keeps the logits and one number a token, and makes the probabilities in backward: they are not kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: Group) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = summed(wide.amax(-1), group, "max")
        shifted = wide - largest[..., None]
        rows, mine = own(targets, first, logits.shape[-1])
        own_target = shifted.gather(-1, rows[..., None])[..., 0] * mine
        total, target = summed(torch.stack((shifted.exp_().sum(-1), own_target)), group)
        log_total = total.log()
        ctx.save_for_backward(logits, largest + log_total, targets)
        ctx.first = first
        return torch.where(targets != IGNORED, log_total - target, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, log_total, targets = ctx.saved_tensors
        rows, mine = own(targets, ctx.first, logits.shape[-1])
        gradient = (logits.to(log_total.dtype) - log_total[..., None]).exp_()
        gradient.scatter_add_(-1, rows[..., None], -mine[..., None].to(gradient.dtype))
        scale = torch.where(targets != IGNORED, grads[0], 0.0)
        return gradient.mul_(scale[..., None]).to(logits.dtype), None, None, None
