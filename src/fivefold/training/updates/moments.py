"""AdamW's two moments between float32, in which they are computed, and what they are kept in."""

import torch
from torch import Tensor

from fivefold.training.updates import codes, stochastic
from fivefold.training.updates.places import Places

CODES = torch.uint8
"""The dtype of moments in 8 bits, and `codes.py` what its numbers stand for."""


def widened(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """As they are kept, in float32."""
    return codes.decoded(first, second) if first.dtype == CODES else (first.float(), second.float())


def narrowed(
    m: Tensor, v: Tensor, dtype: torch.dtype, places: Places, start: int, key: stochastic.Key
) -> tuple[Tensor, Tensor]:
    """In float32, as they are kept in `dtype`; they begin with the element `start` of those at `places`."""
    if dtype == torch.float32:
        return m, v
    words = stochastic.random_words(places.indices(start, start + m.numel(), m.device), key)
    if dtype == CODES:
        return codes.encoded(m, v, words)
    return stochastic.rounded(m, stochastic.half(words, 0)), stochastic.rounded(v, stochastic.half(words, 1))
