"""What kernels round by chance: `stochastic.py` and `codes.py` on a GPU, bit for bit.

bfloat16 comes as int16, for its bits.
"""

import triton
import triton.language as tl

from fivefold.training.updates import codes, stochastic
from fivefold.training.updates.codes import RATIO, SQUARE

_FIRST, _SECOND = tl.constexpr(stochastic.FIRST), tl.constexpr(stochastic.SECOND)
_EXPONENT, _QUIET = tl.constexpr(stochastic.EXPONENT), tl.constexpr(stochastic.QUIET)
_BIAS, _FRACTION = tl.constexpr(codes.BIAS), tl.constexpr(codes.FRACTION)
_SIGN, _TO_SIGN = tl.constexpr(codes.SIGN), tl.constexpr(codes.TO_SIGN)


_RATIO_CUT, _RATIO_BASE = tl.constexpr(RATIO.cut), tl.constexpr(RATIO.base)
_RATIO_SMALLEST, _RATIO_LARGEST = tl.constexpr(RATIO.smallest), tl.constexpr(RATIO.largest)
_SQUARE_CUT, _SQUARE_BASE = tl.constexpr(SQUARE.cut), tl.constexpr(SQUARE.base)
_SQUARE_SMALLEST, _SQUARE_LARGEST = tl.constexpr(SQUARE.smallest), tl.constexpr(SQUARE.largest)
_SQUARE_FRACTION = tl.constexpr(SQUARE.fraction)


@triton.jit
def _mixed(words):
    words = (words ^ (words >> 16)) * _FIRST
    words = (words ^ (words >> 15)) * _SECOND
    return words ^ (words >> 16)


@triton.jit
def random_words(index, key_0, key_1):
    """32 random bits of each global index, as uint32."""
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    return _mixed(_mixed(low ^ key_0.to(tl.uint32)) ^ high ^ key_1.to(tl.uint32))


@triton.jit
def widened(stored):
    """bfloat16 in float32."""
    return (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def rounded(values, chance):
    """float32 as bfloat16."""
    bits = values.to(tl.uint32, bitcast=True)
    up = bits + chance
    finite = (bits & _EXPONENT) != _EXPONENT
    stays = ((up & _EXPONENT) == _EXPONENT) | (finite == 0)
    up = tl.where(stays, bits, up)
    up = tl.where(values != values, up | _QUIET, up)
    return (up >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def _code(
    numbers,
    chance,
    CUT: tl.constexpr,  # noqa: N803
    BASE: tl.constexpr,  # noqa: N803
    SMALLEST: tl.constexpr,  # noqa: N803
    LARGEST: tl.constexpr,  # noqa: N803
):
    """`Code.of`: float32 from 0 up as codes (int32)."""
    bits = numbers.to(tl.uint32, bitcast=True)
    up = bits + ((2 * chance + 1) << (CUT - 17))
    found = tl.minimum((up >> CUT).to(tl.int32) - BASE, LARGEST)
    reached = (chance.to(tl.float32) + 0.5) * (SMALLEST / 65536) < numbers
    found = tl.where(numbers < SMALLEST, reached.to(tl.int32), found)
    return tl.where((bits & _EXPONENT) == _EXPONENT, LARGEST + 1, found)


@triton.jit
def _number(found, CUT: tl.constexpr, BASE: tl.constexpr, LARGEST: tl.constexpr):  # noqa: N803
    """`Code.numbers`: of codes (int32), in float32."""
    numbers = ((found + BASE) << CUT).to(tl.float32, bitcast=True)
    numbers = tl.where(found == 0, 0.0, numbers)
    return tl.where(found > LARGEST, float("nan"), numbers)


@triton.jit
def _root(squares):
    """The exponent of the power of two below the root of what codes of squares stand for."""
    exponent = (tl.maximum(squares, 1) + _SQUARE_BASE) >> _SQUARE_FRACTION
    return ((exponent + _BIAS) >> 1) - _BIAS


@triton.jit
def decoded(first, second):
    """Both moments in float32, of their codes (uint8)."""
    ratios, squares = first.to(tl.int32), second.to(tl.int32)
    unit = ((_root(squares) + _BIAS) << _FRACTION).to(tl.float32, bitcast=True)
    m = _number(ratios & (_SIGN - 1), _RATIO_CUT, _RATIO_BASE, _RATIO_LARGEST) * unit
    bits = m.to(tl.int32, bitcast=True) | ((ratios & _SIGN) << _TO_SIGN)
    return bits.to(tl.float32, bitcast=True), _number(squares, _SQUARE_CUT, _SQUARE_BASE, _SQUARE_LARGEST)


@triton.jit
def encoded(m, v, words):
    """Both moments, float32, as codes (uint8)."""
    squares = _code(v, words >> 16, _SQUARE_CUT, _SQUARE_BASE, _SQUARE_SMALLEST, _SQUARE_LARGEST)
    inverse = ((-_root(squares) + _BIAS) << _FRACTION).to(tl.float32, bitcast=True)
    chance, size = words & 0xFFFF, tl.abs(m) * inverse
    ratios = _code(size, chance, _RATIO_CUT, _RATIO_BASE, _RATIO_SMALLEST, _RATIO_LARGEST)
    signs = tl.where(ratios > _RATIO_LARGEST, 0, (m.to(tl.int32, bitcast=True) >> _TO_SIGN) & _SIGN)
    return (ratios + signs).to(tl.uint8), squares.to(tl.uint8)
