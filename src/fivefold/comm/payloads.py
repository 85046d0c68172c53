"""How gradients become messages: which share a bucket, and a message's bytes in fewer bits. No torch."""

from collections.abc import Sequence
from typing import Any

BLOCK = 64
"""Neighbouring numbers that share a scale in 8 bits."""
SCALE = 2
"""Bytes of a block's scale, a bfloat16."""
RESIDUAL = 2
"""Bytes of what rounding left out of a number, a bfloat16."""


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


def packed_bytes(elements: Any, kind: str) -> Any:
    """Bytes of `elements` neighbouring numbers in the format `kind`: "bf16" or "int8", scales included."""
    return 2 * elements if kind == "bf16" else -(-elements // BLOCK) * (BLOCK + SCALE)


def part_length(elements: Any, ranks: Any, kind: str) -> Any:
    """How many of `elements` numbers each rank adds up, the last one perhaps fewer.

    Whole blocks in 8 bits: numbers share a scale with the same neighbours, however many ranks there are.
    """
    return -(-elements // ranks) if kind == "bf16" else -(-elements // (ranks * BLOCK)) * BLOCK


def compressed_bytes(elements: Any, ranks: Any, kind: str) -> Any:
    """Bytes of either message of a compressed sum of `elements` numbers: every rank adds up an equal part."""
    return ranks * packed_bytes(part_length(elements, ranks, kind), kind)
