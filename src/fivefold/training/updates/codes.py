"""AdamW's moments in 8 bits each: floating-point numbers of few bits, without any scale beside them.

    second moment v   6 bits of exponent, 2 of fraction: 2^-56 to 1.25 2^7, and 0
    first moment m    a sign and |m| / u with 4 bits of exponent, 3 of fraction: 2^-11 to 1.625 2^4, and 0
    u                 the power of two below sqrt(v): the one half of v's exponent, which is in its code

A moment is never much larger than the root of the squares' mean, and what is much smaller moves nothing. So v
is all the scale that m needs, and a code is a function of one element: no block of neighbours has to lie on
one rank. Both are rounded up or down by chance (`stochastic.py`), also below the smallest number, so that the
mean is what was rounded. What is larger than the largest becomes it; what is not finite reads as NaN, and has
no sign: a GPU's NaN has another than a CPU's.

Under an `eps` of 1e-8 no v below 2^-53 matters. The largest is that of gradients of 12.6 in every update.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.training.updates.stochastic import half

BIAS, FRACTION = 127, 23
"""Of a float32: what is added to its exponent, and how many bits of fraction it has."""


class Code(NamedTuple):
    """Numbers from 0 up, by codes of the same order. Code 0 is 0, and code 1 is the smallest number above.

    fraction  bits of it
    lowest    exponent of the smallest number
    largest   code of the largest number; the next one is NaN
    """

    fraction: int
    lowest: int
    largest: int

    @property
    def cut(self) -> int:
        """How many bits of a float32 are cut off."""
        return FRACTION - self.fraction

    @property
    def smallest(self) -> float:
        return 2.0**self.lowest

    @property
    def base(self) -> int:
        """What the upper bits of a float32 have more than its code."""
        return ((self.lowest + BIAS) << self.fraction) - 1

    def of(self, numbers: Tensor, chance: Tensor) -> Tensor:
        """Codes (int32) of float32 `numbers` from 0 up, each rounded by 16 random bits (int32)."""
        up = numbers.view(torch.int32) + ((2 * chance + 1) << (self.cut - 17))
        codes = ((up >> self.cut) - self.base).clamp(max=self.largest)
        reached = (chance.float() + 0.5) * (self.smallest / 65536) < numbers
        codes = torch.where(numbers < self.smallest, reached.to(torch.int32), codes)
        return torch.where(torch.isfinite(numbers), codes, self.largest + 1)

    def numbers(self, codes: Tensor) -> Tensor:
        """What codes (int32) stand for, in float32."""
        found = ((codes + self.base) << self.cut).view(torch.float32)
        found = torch.where(codes == 0, 0.0, found)
        return torch.where(codes > self.largest, torch.nan, found)


SQUARE = Code(fraction=2, lowest=-56, largest=254)
RATIO = Code(fraction=3, lowest=-11, largest=126)
SIGN, TO_SIGN = 128, 24
"""The bit of a first moment's sign, and how far it lies from that of a float32."""


def encoded(m: Tensor, v: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments, float32, as codes (uint8), rounded by 32 random bits for each element (int32)."""
    squares = SQUARE.of(v, half(words, 1))
    ratios = RATIO.of(m.abs() * _unit(squares, -1), half(words, 0))
    signs = torch.where(ratios > RATIO.largest, 0, (m.view(torch.int32) >> TO_SIGN) & SIGN)
    return (ratios + signs).to(torch.uint8), squares.to(torch.uint8)


def decoded(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments in float32, of their codes (uint8)."""
    ratios, squares = first.to(torch.int32), second.to(torch.int32)
    m = RATIO.numbers(ratios & (SIGN - 1)) * _unit(squares, 1)
    signed = m.view(torch.int32) | ((ratios & SIGN) << TO_SIGN)
    return signed.view(torch.float32), SQUARE.numbers(squares)


def _unit(squares: Tensor, power: int) -> Tensor:
    """The power of two below the root of what codes stand for, or its inverse; of 0 as of the smallest."""
    exponent = (squares.clamp(min=1) + SQUARE.base) >> SQUARE.fraction
    root = ((exponent + BIAS) >> 1) - BIAS
    return ((power * root + BIAS) << FRACTION).view(torch.float32)
