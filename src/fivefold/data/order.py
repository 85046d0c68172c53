"""Which sample comes when: a pure function of (seed, global sample number).

Nothing is stored and nothing is stepped through. That makes the data state of a run one number,
lets any rank find its samples alone, and lets a run go on under another layout with no sample
skipped or seen twice.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import isfinite, lcm

import numpy as np
from numpy.typing import NDArray

from fivefold.data.hashing import WORD, key_of, scramble, scramble_all
from fivefold.problems import BadInput, Problem

LONGEST_CYCLE = 4096
ROUNDS = 6


def permute(number: int, size: int, key: int) -> int:
    """Where `number` goes in the pseudo-random permutation of range(size) that `key` names.

    A Feistel network permutes the smallest even number of bits that holds `size`; results outside
    the range are sent through again until one falls inside, which keeps it a permutation. The
    network's domain is less than four times `size`, so that takes less than four tries on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for turn in range(ROUNDS):
            # Every round needs noise of its own: equal rounds can undo each other.
            noise = scramble((key + right + turn * 0x9E3779B97F4A7C15) & WORD)
            left, right = right, left ^ (noise & mask)
        number = left << half | right
        if number < size:
            return number


def slots(weights: Sequence[float]) -> tuple[int, ...]:
    """How many samples of each source one cycle of the mix holds.

    The cycle is the shortest that gives every weight its exact share, if one of at most 4096 does;
    else it has 4096 slots, shared out by largest remainder. A share too small for one slot is
    refused: that source would never be seen.
    """
    for weight in weights:
        if not (weight > 0 and isfinite(weight)):
            raise BadInput([Problem("data.source", f"weight {weight}", "A weight is a number above 0.")])
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    cycle = min(lcm(*(share.denominator for share in shares)), LONGEST_CYCLE)
    counts = [int(share * cycle) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i] * cycle, i))
    for i in by_remainder[: cycle - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        starved = counts.index(0)
        raise BadInput(
            [
                Problem(
                    "data.source",
                    f"weight {weights[starved]} (source {starved + 1}) is under 1/{LONGEST_CYCLE} of the mix",
                    "Raise its weight, or leave the source out.",
                )
            ]
        )
    return tuple(counts)


@lru_cache(maxsize=4)
def _cycle(counts: tuple[int, ...], key: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One cycle of the mix: for each slot its source, and how many earlier slots are that source's."""
    length = sum(counts)
    words = scramble_all(np.arange(length, dtype=np.uint64) + np.uint64(key))
    sources = np.repeat(np.arange(len(counts)), counts)[np.argsort(words, kind="stable")]
    earlier = np.empty(length, dtype=np.int64)
    for source, count in enumerate(counts):
        earlier[sources == source] = np.arange(count)
    return sources, earlier


class Order:
    """The order in which samples are drawn from one or several sources.

    sizes    samples in each source
    weights  share of each source in the mix; shares hold exactly over every cycle of slots
    seed     another seed is another order
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int | str) -> None:
        self.sizes = tuple(sizes)
        self.counts = slots(weights)
        self.seed = seed

    def locate(self, number: int) -> tuple[int, int]:
        """The (source, index within it) of global sample `number`, which counts from 0 for ever.

        A source is gone through in whole epochs: every index once, then every index once again in
        another order.
        """
        source, nth = self._slot(number)
        size = self.sizes[source]
        epoch, position = divmod(nth, size)
        return source, permute(position, size, key_of(self.seed, "source", source, "epoch", epoch))

    def _slot(self, number: int) -> tuple[int, int]:
        """The source of sample `number`, and how many samples before it are of that source."""
        if len(self.counts) == 1:
            return 0, number
        cycle, slot = divmod(number, sum(self.counts))
        sources, earlier = _cycle(self.counts, key_of(self.seed, "mix", cycle))
        source = int(sources[slot])
        return source, cycle * self.counts[source] + int(earlier[slot])
