"""The training loss."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, summed over the tokens that count; a target of -100 does not.

    A sum, so that parts of a batch add up whatever way it was cut; the caller divides by the count.

    logits   [..., V], any floating dtype; computed in float32, or float64 where they are
    targets  [...] int64
    returns  scalar, float32 or float64
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
