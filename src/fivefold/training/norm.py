"""The norm of all gradients together, whichever way they are split, and clipping by it.

On one process, on a CPU, this is bit for bit what `torch.nn.utils.clip_grad_norm_` computes. Among several
ranks each contributes the squares of its own elements, divided by the number of ranks that hold the same
ones. On a GPU a kernel reads all gradients once (`squares.py`). One in 16 bits counts as the same numbers in
float32.
"""

import torch
from torch import Tensor

from fivefold.comm.compat import norm_each
from fivefold.training.launches import has_kernels

CLIP_EPSILON = 1e-6  # as torch has it: keeps the division defined for a norm of zero


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which dtype the norm of such gradients is computed, and told."""
    return dtype if dtype == torch.float64 else torch.float32


def local_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm of the gradients on this rank, a scalar tensor: in float32, or in theirs if it is wider."""
    dtype = wide(gradients[0].dtype)
    if has_kernels(gradients[0].device, dtype):
        return _squares(gradients, None).sqrt().to(dtype)
    total: Tensor = torch.linalg.vector_norm(norm_each(gradients, dtype))
    return total


def shared_square(gradients: list[Tensor], shares: Tensor) -> Tensor:
    """This rank's contribution to the squared norm over all ranks, a float64 scalar.

    shares  [gradients] float64: 1 / the number of ranks that hold the same elements
    """
    dtype = wide(gradients[0].dtype)
    if has_kernels(gradients[0].device, dtype):
        return _squares(gradients, shares)
    return norm_each(gradients, dtype).double().square().dot(shares)


def _squares(gradients: list[Tensor], shares: Tensor | None) -> Tensor:
    from fivefold.training.squares import sum_of_squares

    return sum_of_squares(gradients, shares)


def may_exceed(norm: float, limit: float) -> bool:
    """Whether clipping could change anything; if not, it would be a pass over all gradients for nothing."""
    return norm + CLIP_EPSILON > 0.99 * limit


def clipping(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What gradients of this norm are multiplied by so that it is at most `limit`: a scalar."""
    return torch.clamp(limit / (norm + CLIP_EPSILON), max=1.0)
