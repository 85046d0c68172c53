"""The training loss, chunk by chunk of tokens: logits of all tokens are never there at once.

Gradients are made with the logits of a chunk, in forward: nothing of them is kept, and none are made twice.
What is kept until backward has the size of the input and of the weight:

    a chunk   x, weight -> logits -> loss, gradient of logits -> gradient of x, added to that of the weight
    backward  both gradients times the gradient of the loss
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.models.loss import IGNORED

OfChunk = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logits [tokens, V], which it may overwrite, and targets [tokens] -> their summed loss, a scalar, and the
gradient of the logits times `raised` of their dtype, [tokens, V]."""


def chunked_loss(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, of_chunk: OfChunk) -> Tensor:
    """The summed loss of the logits `x @ weight.t()`, of which `chunk` tokens' exist at a time.

    x        [..., dim]
    weight   [V, dim]
    targets  [...] int64
    returns  scalar, float32, or float64 where x is
    """
    x, targets = x.reshape(-1, x.shape[-1]), targets.flatten()
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return _summed(x, weight, targets, chunk, of_chunk)
    x_gradient = torch.empty_like(x, dtype=wide(x.dtype))
    weight_gradient = torch.empty_like(weight, dtype=wide(x.dtype))
    with torch.no_grad():
        total = _summed(x, weight, targets, chunk, of_chunk, (x_gradient, weight_gradient))
    # Apart, so that a pipeline that computes gradients of weights later does so here.
    of_weight = _with_gradient(torch.zeros_like(total), weight, weight_gradient)
    return _with_gradient(total, x, x_gradient) + of_weight


def wide(dtype: torch.dtype) -> torch.dtype:
    """What losses are computed, and gradients added up in: float32, or float64 for that."""
    return torch.promote_types(dtype, torch.float32)


def raised(dtype: torch.dtype) -> float:
    """By how much gradients of logits are larger in their dtype than they are.

    Float16 has no numbers as small as the probabilities of a large vocabulary. The gradient of a token's
    loss is never above 1, so this much is free; and it is taken out again where float32 adds up.
    """
    return 2.0**15 if dtype == torch.float16 else 1.0


def _summed(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    of_chunk: OfChunk,
    gradients: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The loss of all chunks; the gradients of x and weight go into `gradients`."""
    total = torch.zeros((), dtype=wide(x.dtype), device=x.device)
    for start in range(0, len(x), chunk):
        some = slice(start, start + chunk)
        total += _one_chunk(x[some], weight, targets[some], of_chunk, gradients, some)
    return total


def _one_chunk(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    of_chunk: OfChunk,
    gradients: tuple[Tensor, Tensor] | None,
    some: slice,
) -> Tensor:
    """A function of its own, so that its logits are gone before the next chunk's are made."""
    loss, gradient = of_chunk(F.linear(x, weight), targets)
    if gradients is not None:
        x_gradient, weight_gradient = gradients
        lowered = 1 / raised(gradient.dtype)
        _product(x_gradient[some], gradient, weight, lowered)
        _product(weight_gradient, gradient.t(), x, lowered, added=some.start > 0)
    return loss


def _product(out: Tensor, one: Tensor, other: Tensor, factor: float, added: bool = False) -> None:
    """`one @ other` times a factor into `out`, which may be wider and is what it is added up in.

    one [n, k], other [k, m]; out [n, m], to which it is `added`, or which it overwrites
    """
    terms: dict[str, Any] = {"beta": int(added), "alpha": factor, "out": out}
    if out.dtype == one.dtype:
        torch.addmm(out, one, other, **terms)
    elif out.is_cuda:
        torch.addmm(out, one, other, out_dtype=out.dtype, **terms)
    else:  # CPUs have no such product
        torch.addmm(out, one.to(out.dtype), other.to(out.dtype), **terms)


def _with_gradient(value: Tensor, of: Tensor, gradient: Tensor) -> Tensor:
    result: Tensor = _WithGradient.apply(value, of, gradient)  # type: ignore[no-untyped-call]
    return result


class _WithGradient(torch.autograd.Function):
    """Hands on a scalar, of which the gradient of some tensor is known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, of: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = of.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        # In one go, so that it is rounded once, and has no copy in the wide dtype.
        found = torch.empty_like(gradient, dtype=ctx.dtype)
        return None, torch.mul(gradient, grads[0], out=found), None


# --- what a chunk computes ---------------------------------------------------------------------------------

AcrossRanks = Callable[[Tensor, str], Tensor]
"""One number a token, or several, of each rank -> their "sum" or "max"."""


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    softcap: float | None = None,
    first: int = 0,
    across: AcrossRanks = lambda x, operation: x,
) -> tuple[Tensor, Tensor]:
    """As `OfChunk`: `models.loss.summed_cross_entropy` of logits under a soft cap, and its gradient.

    first   the vocabulary's number of the first logit: of one that ranks share, each has a part
    across  puts together what the ranks found
    """
    narrow, count = logits.dtype, logits.shape[-1]
    x, slope = logits.to(wide(narrow)), None
    if softcap is not None:
        slope = (x / softcap).tanh_()
        x = slope * softcap
        slope.square_().neg_().add_(1)
    rows, mine = own(targets, first, count)
    counted = targets != IGNORED
    x.sub_(across(x.amax(-1), "max")[:, None])
    at_target = x.gather(-1, rows[:, None])[:, 0]
    x.exp_()
    total, target = across(torch.stack((x.sum(-1), at_target * mine)), "sum")
    loss = torch.where(counted, total.log() - target, 0.0).sum()

    factor = raised(narrow)
    scale = torch.where(counted, factor / total, 0.0)
    x.mul_(scale[:, None])
    # The probability less 1 where the target is: put there once, in place of an addition to every one.
    at_target = at_target.exp() * scale - mine * factor
    if slope is not None:
        x.mul_(slope)
        at_target *= slope.gather(-1, rows[:, None])[:, 0]
    gradient = x.to(narrow)
    return loss, gradient.scatter_(-1, rows[:, None], at_target[:, None].to(narrow))


def own(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Each token's row among `count` from `first` on, any row where it is not one of them; and whether it is.

    One that is to be ignored never is.
    """
    rows = tokens - first
    mine = (rows >= 0) & (rows < count)
    return rows.clamp(0, count - 1), mine
