"""Hashes that stand in for a random generator: no state, the same on every machine.

Whatever must not depend on rank, layout or restart (sample order, held-out split, synthetic
tokens) is a hash of what it is about.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

WORD = (1 << 64) - 1
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key_of(*parts: int | str) -> int:
    """A 64-bit key for a purpose, such as `key_of(seed, "epoch", 3)`."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def scramble(word: int) -> int:
    """A bijection of 64-bit words that leaves no pattern (the SplitMix64 finaliser)."""
    word = (word ^ word >> 30) * FIRST & WORD
    word = (word ^ word >> 27) * SECOND & WORD
    return word ^ word >> 31


def scramble_all(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`scramble` of every word of an array of any shape."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(FIRST)
    words = (words ^ words >> np.uint64(27)) * np.uint64(SECOND)
    return words ^ words >> np.uint64(31)
