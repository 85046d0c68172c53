"""Newton-Schulz: the nearest orthogonal matrix to each of a batch, to within what an update needs.

A matrix U S V^T, divided by its norm, goes through an odd polynomial a few times. That leaves U and V as they
are. Singular values from a five hundredth of the norm up come to lie between 0.68 and 1.21, not at 1, which
costs an update nothing; smaller ones become up to 485 times as large. All of it is matrix products, for which
16 bits are enough. The coefficients are those of Muon's authors: steep at 0.
"""

import torch
from torch import Tensor

from fivefold.axes.matrices import STEPS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5."""
SMALLEST = 1e-7
"""What a norm is taken for at the least: a matrix of zeros stays one."""


@torch.no_grad()
def orthogonalised(matrices: Tensor) -> Tensor:
    """Each of the `matrices` [b, rows, columns] with its singular values near 1, in the dtype they come in.

    May use their memory.
    """
    first, third, fifth = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # [b, small, large]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide).clamp_(min=SMALLEST))
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.mT if tall else x
