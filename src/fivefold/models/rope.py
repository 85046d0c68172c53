"""Rotary positions: each pair of a head's dimensions is turned by an angle that grows with the position."""

import math

import torch
from torch import Tensor

from fivefold.models.spec import ModelSpec


def rope_tables(spec: ModelSpec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every angle, shaped to broadcast over heads.

    Angles are rounded to float32 whatever `dtype` is: released models were trained with those.

    positions  [S] or [B, S] int64
    returns    cos and sin, each [S, D/2] or [B, 1, S, D/2], of `dtype`
    """
    angles = positions[..., None].float() * _frequencies(spec, positions.device)
    if positions.dim() == 2:
        angles = angles[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of every head, in the dtype of the tables.

    x        [B, H, S, D]
    cos, sin [S, D/2] or [B, 1, S, D/2]
    returns  [B, H, S, D] of x's dtype
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def _frequencies(spec: ModelSpec, device: torch.device) -> Tensor:
    """Radians per position of each pair, [D/2] float32."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=device) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    rotations = scaling.original_max_position / wavelengths
    keep = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies
