"""The norm of all gradients together, whichever way they are split, and clipping by it.

On one process this is bit for bit what `torch.nn.utils.clip_grad_norm_` computes. Among several ranks each
contributes the squares of its own elements, divided by the number of ranks that hold the same ones.
"""

import torch

from fivefold.comm.compat import norm_each

CLIP_EPSILON = 1e-6  # as torch has it: keeps the division defined for a norm of zero


def local_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of the gradients on this rank, a scalar tensor of their dtype."""
    total: torch.Tensor = torch.linalg.vector_norm(norm_each(gradients))
    return total


def shared_square(gradients: list[torch.Tensor], shares: torch.Tensor) -> torch.Tensor:
    """This rank's contribution to the squared norm over all ranks, a float64 scalar.

    shares  [gradients] float64: 1 / the number of ranks that hold the same elements
    """
    return norm_each(gradients).double().square().dot(shares)


def may_exceed(norm: float, limit: float) -> bool:
    """Whether clipping could change anything; if not, it would be a pass over all gradients for nothing."""
    return norm + CLIP_EPSILON > 0.99 * limit


def clipping(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What gradients of this norm are multiplied by so that it is at most `limit`: a scalar."""
    return torch.clamp(limit / (norm + CLIP_EPSILON), max=1.0)
