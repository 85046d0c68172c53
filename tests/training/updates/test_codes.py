"""Moments in 8 bits: what codes stand for, that they are rounded to a neighbour, and right in the mean."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fivefold.training.updates.codes import RATIO, SQUARE, Code, decoded, encoded
from fivefold.training.updates.stochastic import key_of, random_words

BOTH = {"ratio": RATIO, "square": SQUARE}
EVERY = torch.arange(256, dtype=torch.int32)
PAIRS = torch.arange(1 << 16)
FIRST, SECOND = (PAIRS % 256).to(torch.uint8), (PAIRS // 256).to(torch.uint8)
LEAST, MOST = 0, 0xFFFF
MANY = 1 << 16
EVERY_CHANCE = torch.arange(MANY, dtype=torch.int32)

CODES = st.sampled_from(list(BOTH.values()))
CHANCE = st.integers(LEAST, MOST)


def codes_of(code: Code) -> Tensor:
    """All that stand for numbers."""
    return EVERY[: code.largest + 1]


def largest_of(code: Code) -> Tensor:
    return code.numbers(EVERY[code.largest])


def chance(number: int, count: int = 1) -> Tensor:
    return torch.full((count,), number, dtype=torch.int32)


def numbers(code: Code) -> st.SearchStrategy[Tensor]:
    """float32 from 0 to some times the largest."""
    top = int((2 * largest_of(code)[None]).view(torch.int32).item())
    return st.integers(0, top).map(lambda bits: torch.tensor([bits], dtype=torch.int32).view(torch.float32))


# --- one number --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_numbers_grow_with_their_codes_from_zero_on(name: str) -> None:
    code = BOTH[name]
    found = code.numbers(codes_of(code)).double()
    assert found[0] == 0
    assert found[1] == 2.0**code.lowest
    steps = found[1:].diff() / found[1:-1]
    assert (steps > 2.0 ** -(code.fraction + 1)).all(), "each is more than the one before"
    assert (steps <= 2.0**-code.fraction).all()
    assert code.numbers(EVERY[code.largest + 1 : code.largest + 2]).isnan().all()


def test_the_numbers_that_are_written_down() -> None:
    """A checkpoint of one version is read by the next."""
    assert SQUARE.numbers(EVERY[[1, 2, 225, 254]]).tolist() == [2.0**-56, 1.25 * 2.0**-56, 1.0, 160.0]
    assert RATIO.numbers(EVERY[[1, 2, 89, 126]]).tolist() == [2.0**-11, 1.125 * 2.0**-11, 1.0, 26.0]
    m, v = decoded(
        *(torch.tensor(each, dtype=torch.uint8) for each in ([89, 217, 90, 0], [225, 217, 221, 0]))
    )
    assert v.tolist() == [1.0, 0.25, 0.5, 0.0]
    assert m.tolist() == [1.0, -0.5, 1.125 * 0.5, 0.0], "in parts of 2^0, 2^-1 and 2^-1"


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("number", [LEAST, 1, 0x8000, MOST])
def test_what_a_code_stands_for_has_this_code(name: str, number: int) -> None:
    code = BOTH[name]
    there = EVERY[: code.largest + 2]
    assert torch.equal(code.of(code.numbers(there), chance(number, len(there))), there)


@given(data=st.data(), code=CODES, number=CHANCE)
def test_only_a_neighbour(data: st.DataObject, code: Code, number: int) -> None:
    value = data.draw(numbers(code))
    found = code.of(value, chance(number))
    below = int((code.numbers(codes_of(code)) <= value).sum()) - 1
    assert int(found) in (below, min(below + 1, code.largest))


@given(data=st.data(), code=CODES, number=CHANCE)
def test_what_is_more_has_no_lesser_code(data: st.DataObject, code: Code, number: int) -> None:
    less, more = sorted(float(data.draw(numbers(code))) for _ in range(2))
    found = code.of(torch.tensor([less, more]), chance(number, 2))
    assert found[0] <= found[1]
    assert (
        code.of(torch.tensor([less]), chance(LEAST))
        <= found[0]
        <= code.of(torch.tensor([less]), chance(MOST))
    )


@given(data=st.data(), code=CODES)
def test_the_mean_over_all_chances_is_what_was_rounded(data: st.DataObject, code: Code) -> None:
    largest = float(largest_of(code))
    value = data.draw(numbers(code).filter(lambda value: float(value) <= largest))
    codes = code.of(value.expand(MANY).contiguous(), EVERY_CHANCE)
    found = code.numbers(codes).double()
    step = float(found.max() - found.min()) or 2.0**code.lowest
    assert abs(float(found.mean()) - float(value)) <= step * 2.0**-16


@pytest.mark.parametrize("name", BOTH)
def test_so_it_is_below_the_smallest_number(name: str) -> None:
    """Which is seldom drawn."""
    code = BOTH[name]
    value = torch.tensor(0.3 * code.smallest)
    found = code.numbers(code.of(value.expand(MANY).contiguous(), EVERY_CHANCE)).double()
    assert float(found.mean()) == pytest.approx(float(value), rel=1e-4)


@pytest.mark.parametrize("name", BOTH)
def test_what_is_too_large_is_the_largest_and_what_is_not_finite_is_nan(name: str) -> None:
    code = BOTH[name]
    largest = float(largest_of(code))
    large = torch.tensor([largest * 1.001, largest * 2, torch.finfo(torch.float32).max])
    strange = torch.tensor([math.inf, math.nan])
    for number in (LEAST, MOST):
        assert (code.of(large, chance(number, 3)) == code.largest).all()
        assert code.numbers(code.of(strange, chance(number, 2))).isnan().all()


# --- both moments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [0, -1, 0x7FFF8000, -0x7FFF8000])
def test_moments_that_were_kept_stay_as_they_are(words: int) -> None:
    """All pairs of codes, but those whose first one is not finite: then its sign is lost."""
    kept = encoded(*decoded(FIRST, SECOND), torch.full(FIRST.shape, words, dtype=torch.int32))
    assert torch.equal(kept[1], SECOND)
    numbers = decoded(FIRST, SECOND)[0].isfinite()
    assert torch.equal(kept[0][numbers], FIRST[numbers])
    assert (kept[0][~numbers] % 128 > RATIO.largest).all()


@given(
    size=st.floats(-11, 0.5),
    share=st.floats(-3.0, 3.0),
    number=st.integers(-(1 << 31), (1 << 31) - 1),
)
def test_a_first_moment_as_large_as_a_root_is_off_by_a_step(size: float, share: float, number: int) -> None:
    v = torch.tensor([10.0**size])
    m = share * v.sqrt()
    words = torch.tensor([number], dtype=torch.int32)
    found_m, found_v = decoded(*encoded(m, v, words))
    assert abs(found_v - v) <= v / 4
    # A step of the ratio, or the smallest one in parts of a root that itself may be 12% larger.
    assert abs(found_m - m) <= m.abs() / 8 + 1.2 * 2.0**-11 * v.sqrt()
    assert torch.equal(found_m.signbit(), m.signbit())


def test_moments_are_right_in_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    shares, v = torch.randn(64, generator=generator), torch.randn(64, generator=generator).square()
    m = shares * v.sqrt()
    count = 1 << 14
    words = random_words(torch.arange(64 * count), key_of(0, 1, "a"))
    found = decoded(*encoded(m.repeat(count), v.repeat(count), words))
    for moment, kept, step in ((m, found[0], 1 / 8), (v, found[1], 1 / 4)):
        off = kept.view(count, 64).double().mean(0) - moment
        allowed = 5 * 0.5 * (step * moment.abs() + 2.0**-10 * v.sqrt()) / math.sqrt(count)
        assert (off.abs() <= allowed).all()


def test_both_moments_have_chances_of_their_own() -> None:
    """Halfway between two codes, half of each goes up; and of those whose first does, half of the second."""
    half_up = torch.full((MANY,), 1.0 + 1 / 16), torch.full((MANY,), 1.0 + 1 / 8)
    m, v = decoded(*encoded(*half_up, random_words(torch.arange(MANY), key_of(0, 1, "a"))))
    ups = [(moment > 1.0).double() for moment in (m, v)]
    for share, expected in ((ups[0], 1 / 2), (ups[1], 1 / 2), (ups[0] * ups[1], 1 / 4)):
        assert abs(float(share.mean()) - expected) < 5 * 0.5 / math.sqrt(MANY)


def test_zeros_and_what_is_not_finite() -> None:
    words = torch.full((1,), -1, dtype=torch.int32)

    def kept(m: float, v: float) -> tuple[float, float]:
        found = decoded(*encoded(torch.tensor([m]), torch.tensor([v]), words))
        return float(found[0]), float(found[1])

    assert kept(0.0, 0.0) == (0.0, 0.0)
    assert kept(-0.0, 1.0) == (0.0, 1.0)
    assert kept(2.0**-30, 0.0)[0] == 2.0**-30, "a second moment of 0 takes nothing from the first"
    assert math.isnan(kept(math.nan, 1.0)[0])
    assert math.isnan(kept(-math.inf, 1.0)[0])
    assert math.isnan(kept(0.0, math.inf)[1])
    assert math.isnan(kept(0.0, math.nan)[1])
