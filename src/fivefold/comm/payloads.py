"""How gradients become messages: which share a bucket, and a bucket's bytes in 8 bits. No torch."""

from collections.abc import Sequence
from typing import Any

BLOCK = 512
"""Neighbouring numbers that share a scale in 8 bits."""
SCALE = 4
"""Bytes of a block's scale, a float32."""


def fill_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Group parameters into buckets of at most `limit` bytes (a larger parameter has one to itself).

    sizes  bytes of each parameter's gradient, in the model's order
    Returns the parameters' indices, bucket by bucket, in the order in which backward fills them.
    """
    buckets: list[list[int]] = []
    room = 0
    for index in reversed(range(len(sizes))):
        if sizes[index] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets


def compressed_bytes(elements: Any, ranks: Any) -> Any:
    """Bytes of either message of a sum of `elements` numbers over `ranks` ranks, in 8 bits."""
    blocks = -(-elements // (ranks * BLOCK))  # of each rank's part
    return ranks * blocks * (BLOCK + SCALE)
