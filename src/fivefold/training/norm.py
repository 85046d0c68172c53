"""The norm of all gradients together, whichever way they are split, and clipping by it.

On one process this is bit for bit what `torch.nn.utils.clip_grad_norm_` computes. With shards, each rank
contributes the squares of its own elements.
"""

from __future__ import annotations

import torch

CLIP_EPSILON = 1e-6  # as torch has it: keeps the division defined for a norm of zero


def local_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of the gradients on this rank, a scalar tensor of their dtype."""
    norms = torch.stack(torch._foreach_norm(gradients))
    total: torch.Tensor = torch.linalg.vector_norm(norms)
    return total


def may_exceed(norm: float, limit: float) -> bool:
    """Whether clipping could change anything; if not, it would be a pass over all gradients for nothing."""
    return norm + CLIP_EPSILON > 0.99 * limit


def clip(gradients: list[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """Scale the gradients in place so that their norm is at most `limit`."""
    scale = torch.clamp(limit / (norm + CLIP_EPSILON), max=1.0)
    torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
