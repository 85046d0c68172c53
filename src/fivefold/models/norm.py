"""Norms, and the soft cap: a bound on scores and logits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.models.spec import ModelSpec


class OffsetRMSNorm(nn.RMSNorm):
    """Multiplies by 1 + weight (Gemma): added in float32, since narrow numbers are coarser near 1 than 0."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        assert self.eps is not None
        return offset_rms_norm(x, self.weight, self.eps)


def offset_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D]: computed in float32 or wider, and rounded once, at the end."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, 1 + weight.to(wide), eps).to(x.dtype)


def stream_norm(spec: ModelSpec) -> nn.Module:
    """A norm of the residual stream. Torch's own work in float32 inside when the input is narrower."""
    if spec.norm == "rmsnorm":
        return rms_norm(spec, spec.dim)
    return nn.LayerNorm(spec.dim, spec.norm_eps, bias=spec.norm_bias)


def rms_norm(spec: ModelSpec, width: int) -> nn.RMSNorm:
    """A norm over `width` numbers: of the stream, or of one head of queries or keys."""
    return (OffsetRMSNorm if spec.norm_unit_offset else nn.RMSNorm)(width, spec.norm_eps)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`, element by element: almost x where that is small, and never beyond the cap."""
    return (x / cap).tanh_() * cap
