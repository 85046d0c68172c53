"""Stochastic rounding of float32 to bfloat16: up or down by chance, so that the mean is what was rounded.

To the lower half of a float32's bits a random number of 16 bits is added, and that half is cut off: it goes
up the more often, the further it lies from the bfloat16 below. Rounded to the nearest one instead, a moment
would lose all changes of less than half a step, which are most of them.

Chance is a function: a hash of (seed, step, parameter) and of an element's index in the whole parameter. So
every layout rounds alike, and so does a run that is resumed. The hash is in 32-bit words, which wrap alike in
torch's int32 and in the kernel's uint32 (`kernels.py`, which tests hold to these functions bit for bit).
"""

import hashlib

import torch
from torch import Tensor

Key = tuple[int, int]
"""Two words, as int32: what a step and a parameter begin their hash with."""

FIRST, SECOND = 0x7FEB352D, 0x846CA68B
"""Odd factors of the hash's two rounds; with shifts of 16, 15 and 16 bits every bit of a word reaches all."""
EXPONENT, QUIET = 0x7F800000, 0x00400000
"""Bits of a float32: its exponent, all set where it is not finite; and one that keeps a NaN a NaN."""


def key_of(seed: int, step: int, name: str) -> Key:
    """What the update number `step` of a parameter is rounded by."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    return _word(digest[:4]), _word(digest[4:])


def random_words(indices: Tensor, key: Key) -> Tensor:
    """32 random bits for each global index (int64), as int32: 16 for each of two moments."""
    low, high = indices.to(torch.int32), (indices >> 32).to(torch.int32)
    return _mixed(_mixed(low ^ key[0]) ^ high ^ key[1])


def half(words: Tensor, which: int) -> Tensor:
    """The random 16 bits of the first moment (0) or of the second (1), as int32."""
    return words & 0xFFFF if which == 0 else _shifted(words, 16)


def rounded(values: Tensor, chance: Tensor) -> Tensor:
    """float32 `values` as bfloat16, each rounded by its 16 random bits.

    What is a bfloat16 already stays. No finite number becomes infinite; what is infinite or NaN stays so.
    """
    bits = values.view(torch.int32)
    up = bits + chance
    overflows = (up & EXPONENT) == EXPONENT
    up = torch.where(overflows | ~torch.isfinite(values), bits, up)
    up = torch.where(torch.isnan(values), up | QUIET, up)
    return (up >> 16).to(torch.int16).view(torch.bfloat16)


def _mixed(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 16)) * FIRST
    words = (words ^ _shifted(words, 15)) * (SECOND - (1 << 32))
    return words ^ _shifted(words, 16)


def _shifted(words: Tensor, places: int) -> Tensor:
    """Right shift that brings in zeros."""
    return (words >> places) & ((1 << (32 - places)) - 1)


def _word(four: bytes) -> int:
    return int.from_bytes(four, "little", signed=True)
