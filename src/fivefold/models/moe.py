"""The mixture of experts: a router sends every token to a few of many feed-forward layers.

No token is dropped and none is padded: rows are sorted by expert, and each expert takes as many as come.
What an expert adds is weighted by the router's probability of it, renormalised over the chosen (Mixtral).
Two ways keep the experts evenly used:

    a term of the loss   (Fedus et al. 2021, arXiv:2101.03961; here of each sequence by itself)
                         for a sequence of T tokens, E experts, k of them chosen for each token:
                         f_e = E / (k T) x times e was chosen, P_e = mean probability of e,
                         term = balance_weight x sum_e f_e P_e.
                         It is added in backward alone: the loss that is reported stays the cross entropy.
    a bias               (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)
                         added to the probabilities when experts are chosen, and nowhere else; after each step
                         it goes up by `balance_rate` for experts used less than the mean, down for others.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.models.grouped import grouped_linear
from fivefold.models.mlp import ACTIVATIONS, Mlp
from fivefold.models.spec import ModelSpec


class Moe(nn.Module):
    """Routed experts, and a shared one that every token passes through where the spec has it.

    Set from outside:
    routing         "learned", or "balanced": tokens dealt to experts in turn, for measurements
    balance_weight  of the balancing term, divided by the number of sequences it is to be averaged over
    balance_rate    how far one step moves the balancing bias; 0 for none
    loss_scale      what the loss is multiplied by before backward, so that the balancing term is too

    `dispatch`, `sum_counts` and `places` may be replaced on an instance.
    """

    bias_steps: Tensor  # [E] int64: the balancing bias in units of balance_rate, so that no dtype rounds it
    routed: Tensor  # [E] int64: how often each expert was chosen, added up over backward passes

    def __init__(self, spec: ModelSpec):
        super().__init__()
        assert spec.experts is not None
        assert spec.experts_per_token is not None
        self.per_token = spec.experts_per_token
        self.router = Router(spec.dim, spec.experts, bias=False)
        self.experts = Experts(spec)
        self.shared = Mlp(spec, spec.shared_experts * spec.ffn) if spec.shared_experts else None
        self.dispatch: nn.Module = Dispatch()
        self.routing: Literal["learned", "balanced"] = "learned"
        self.balance_weight = 0.0
        self.balance_rate = 0.0
        self.loss_scale: float | Tensor = 1.0
        self.register_buffer("bias_steps", torch.zeros(spec.experts, dtype=torch.int64))
        self.register_buffer("routed", torch.zeros(spec.experts, dtype=torch.int64), persistent=False)

    # Not compiled: how many rows an expert gets is known only when it runs.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, dim] -> [B, S, dim]."""
        probabilities = self.router(x).softmax(-1)
        chosen = self.choose(probabilities)
        gates = probabilities.gather(-1, chosen)
        gates = gates / gates.sum(-1, keepdim=True)

        order = chosen.flatten().argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        counts = _counts(chosen, len(self.bias_steps))
        rows = _Repeat.apply(x.flatten(0, 1), order, place, self.per_token)  # type: ignore[no-untyped-call]
        rows = self.dispatch(self.experts, rows, counts.sum(0))
        rows = permute(rows, place, order).view(*chosen.shape, -1)
        mixed: Tensor = (rows * gates[..., None]).sum(-2).to(x.dtype)

        if self.shared is not None:
            mixed = mixed + self.shared(x)
        balanced: Tensor = _Balance.apply(mixed, probabilities, counts, self)  # type: ignore[no-untyped-call]
        return balanced

    def choose(self, probabilities: Tensor) -> Tensor:
        """Probabilities [B, S, E] -> the experts of each token, all different, [B, S, k] int64."""
        rows, length, experts = probabilities.shape
        if self.routing == "balanced":
            turn = self.places(length, probabilities.device)[:, None] * self.per_token
            turn = turn + torch.arange(self.per_token, device=turn.device)
            return (turn % experts).expand(rows, -1, -1)
        scores = probabilities.detach()
        if self.balance_rate:
            scores = scores + self.balance_rate * self.bias_steps
        return scores.topk(self.per_token).indices

    def places(self, length: int, device: torch.device) -> Tensor:
        """Where each token of a row stands in its sequence, [S] int64."""
        return torch.arange(length, device=device)

    def sum_counts(self, counts: Tensor) -> Tensor:
        """Counts [B, E] over the tokens that are here -> over the whole sequences."""
        return counts

    @torch.no_grad()
    def update_bias(self, counts: Tensor) -> None:
        """Move the balancing bias after a step: counts [E] int64 is `routed`, of all that took part in it."""
        # sign(mean - counts), without a division
        self.bias_steps += torch.sign(counts.sum() - counts * len(counts))

    @torch.no_grad()
    def forget(self) -> None:
        """Set the balancing bias and the counts to zero: also the way to fill them after `to_empty`."""
        self.bias_steps.zero_()
        self.routed.zero_()


class Router(nn.Linear):
    """Scores in float32, or wider where the tokens are: close calls must not hang on bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, dim] -> [B, S, E]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.weight.to(wide))


class Experts(nn.Module):
    """Feed-forward layers of one shape, stacked: one weight for each kind of projection."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.activate = ACTIVATIONS[spec.activation]
        self.gate = StackedLinear(spec, spec.dim, spec.ffn) if spec.gated else None
        self.up = StackedLinear(spec, spec.dim, spec.ffn)
        self.down = StackedLinear(spec, spec.ffn, spec.dim)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [N, dim], sorted by expert; counts [E] int64, how many are each expert's -> [N, dim]."""
        if self.gate is not None:
            hidden = self.activate(self.gate(rows, counts)) * self.up(rows, counts)
        else:
            hidden = self.activate(self.up(rows, counts))
        projected: Tensor = self.down(hidden, counts)
        return projected


class StackedLinear(nn.Module):
    """One linear layer an expert: weight [E, out, in], bias [E, out]."""

    def __init__(self, spec: ModelSpec, into: int, out: int):
        super().__init__()
        assert spec.experts is not None
        self.weight = nn.Parameter(torch.empty(spec.experts, out, into))
        self.bias = nn.Parameter(torch.empty(spec.experts, out)) if spec.mlp_bias else None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [N, in], sorted by expert; counts [E] int64 -> [N, out]."""
        return grouped_linear(rows, self.weight, self.bias, counts)


class Dispatch(nn.Module):
    """Takes rows to their experts and back: no parameters, and easily replaced."""

    def forward(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """experts  maps (rows, counts) to rows, as `Experts` does
        rows     [N, dim], sorted by expert
        counts   [E] int64
        returns  [N, dim], in the same order
        """
        done: Tensor = experts(rows, counts)
        return done


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """`rows[order]`; the derivative is `[inverse]`, where plain indexing would add into zeros.

    rows [N, dim]; order, inverse [N] int64 -> [N, dim]
    """
    permuted: Tensor = _Permute.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return permuted


def _counts(chosen: Tensor, experts: int) -> Tensor:
    """How often a row's tokens chose each expert: [B, S, k] int64 -> [B, E] int64."""
    flat = chosen.flatten(1)
    return flat.new_zeros(len(flat), experts).scatter_add_(1, flat, torch.ones_like(flat))


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].index_select(0, ctx.inverse), None, None


class _Repeat(torch.autograd.Function):
    """Every row `times` times, in another order: tokens [T, dim], order [T * times] -> [T * times, dim]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, times: int) -> Tensor:
        ctx.inverse, ctx.times = inverse, times
        return tokens.index_select(0, order // times)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back = grads[0].index_select(0, ctx.inverse)
        return back.view(-1, ctx.times, back.shape[-1]).sum(1), None, None, None


class _Balance(torch.autograd.Function):
    """Hands `x` on; in backward adds the balancing term's gradient, and counts who was chosen.

    Forward may run again before backward does, or without it: what must happen once a pass happens here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, probabilities: Tensor, counts: Tensor, moe: Moe) -> Tensor:
        ctx.shape, ctx.dtype = probabilities.shape, probabilities.dtype
        ctx.counts, ctx.moe = counts, moe
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        moe, counts = ctx.moe, ctx.counts
        moe.routed.add_(counts.sum(0))
        if not moe.balance_weight:
            return grads[0], None, None, None
        counts = moe.sum_counts(counts).to(ctx.dtype)
        chosen = counts.sum(1, keepdim=True)  # k T, with T the tokens of the whole sequence
        fraction, tokens = counts * counts.shape[1] / chosen, chosen / moe.per_token
        slope = moe.balance_weight * moe.loss_scale * fraction / tokens
        return grads[0], slope[:, None].expand(ctx.shape), None, None
