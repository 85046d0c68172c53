"""Stochastic rounding: unbiased, to a neighbour, and a function of (seed, step, parameter, moment, index)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.training.updates.stochastic import half, key_of, random_words, rounded

MANY = 1 << 18
KEY = key_of(0, 1, "blocks.0.mlp.down.weight")
WORDS = random_words(torch.arange(MANY), KEY)
LARGEST = torch.finfo(torch.bfloat16).max


def as_float(bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)


def chance(number: int) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.int32)


# --- rounding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.001, -1.001, 1 / 3, -7e-12, 3.0e38, 1.00001, 2.9999, 1e-39])
@pytest.mark.parametrize("moment", [0, 1])
def test_the_mean_is_what_was_rounded(value: float, moment: int) -> None:
    value = torch.tensor(value).item()
    found = rounded(torch.full((MANY,), value), half(WORDS, moment)).double()
    below, above = found.min().item(), found.max().item()
    assert below < value < above, "it goes both ways"
    up = (value - below) / (above - below)
    deviation = (above - below) * math.sqrt(up * (1 - up) / MANY)
    assert abs(found.mean().item() - value) < 4 * deviation


def test_a_value_goes_up_as_often_as_it_lies_above() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32)
    for lower in (0, 1, 77, 0x8000, 0xFFFF):
        value = as_float(0x3F800000 + lower).expand(1 << 16).contiguous()
        assert int((rounded(value, every) > 1).sum()) == lower


def test_what_is_a_bfloat16_already_stays() -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    for number in (0, 1, 0x8000, 0xFFFF):
        found = rounded(every.float(), torch.full((1 << 16,), number, dtype=torch.int32))
        assert torch.equal(found.isnan(), every.isnan())
        kept = ~every.isnan()
        assert torch.equal(found.view(torch.int16)[kept], every.view(torch.int16)[kept])


@given(bits=st.integers(0, (1 << 32) - 1), number=st.integers(0, 0xFFFF))
def test_only_a_neighbour_and_nothing_becomes_infinite(bits: int, number: int) -> None:
    value = as_float(bits)
    found = rounded(value, chance(number))
    if value.isnan():
        assert found.isnan()
        return
    top = int(found.view(torch.int16).item()) & 0xFFFF
    assert top - (bits >> 16) in (0, 1)
    assert torch.equal(found.isinf(), value.isinf())
    assert torch.equal(found.signbit(), value.signbit())


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_above_the_largest_bfloat16_stays_finite(sign: int) -> None:
    largest = sign * torch.tensor([torch.finfo(torch.float32).max])
    assert rounded(largest, chance(0xFFFF)).item() == sign * LARGEST
    assert rounded(sign * torch.tensor([math.inf]), chance(0xFFFF)).item() == sign * math.inf


@pytest.mark.parametrize("bits", [0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0xFF800001])
def test_a_nan_stays_one(bits: int) -> None:
    assert rounded(as_float(bits), chance(0xFFFF)).isnan()


# --- chance ------------------------------------------------------------------------------------------------


def mixed(word: int) -> int:
    """One round of the hash, in numbers without bounds."""
    word = (word ^ word >> 16) * 0x7FEB352D & 0xFFFFFFFF
    word = (word ^ word >> 15) * 0x846CA68B & 0xFFFFFFFF
    return word ^ word >> 16


@given(index=st.integers(0, 2**62), seed=st.integers(0, 2**63 - 1), step=st.integers(1, 2**24))
def test_words_are_the_hash_in_unsigned_arithmetic(index: int, seed: int, step: int) -> None:
    key = key_of(seed, step, "x")
    first, second = (word & 0xFFFFFFFF for word in key)
    expected = mixed(mixed(index & 0xFFFFFFFF ^ first) ^ index >> 32 ^ second)
    word = random_words(torch.tensor([index]), key)
    assert int(word.item()) & 0xFFFFFFFF == expected
    assert half(word, 0).item() == expected & 0xFFFF
    assert half(word, 1).item() == expected >> 16


def test_a_checkpoint_goes_on_alike_in_later_versions() -> None:
    assert key_of(7, 3, "head.output.weight") == GOLDEN_KEY
    indices = torch.tensor([0, 1, 2**31, 2**32, 2**32 + 1, 2**40])
    assert random_words(indices, GOLDEN_KEY).tolist() == GOLDEN_WORDS


GOLDEN_KEY = (437425630, 360140925)
GOLDEN_WORDS = [420508250, -2134828352, 1799282399, 1156153366, 252724524, 1278336488]


@pytest.mark.parametrize("other", [key_of(1, 1, "a"), key_of(0, 2, "a"), key_of(0, 1, "b")])
def test_seeds_steps_and_parameters_have_chances_of_their_own(other: Any) -> None:
    plain = random_words(torch.arange(MANY), key_of(0, 1, "a"))
    assert_unrelated(plain, random_words(torch.arange(MANY), other))


def test_indices_and_moments_have_chances_of_their_own() -> None:
    assert_unrelated(WORDS[1:], WORDS[:-1])
    assert_unrelated(WORDS, random_words(torch.arange(MANY) + 2**32, KEY))
    assert_unrelated(half(WORDS, 0), half(WORDS, 1))


def test_steps_of_one_element_are_unrelated_too() -> None:
    index = torch.tensor([5])
    words = torch.cat([random_words(index, key_of(0, step, "a")) for step in range(1, 4097)])
    assert_unrelated(words[1:], words[:-1])


def assert_unrelated(one: torch.Tensor, other: torch.Tensor) -> None:
    """Of either the lower 16 bits: each is set half of the time, and the two agree half of the time."""
    count = one.numel()
    bits = [torch.stack([words >> place & 1 for place in range(16)]).double() for words in (one, other)]
    for share in (bits[0].mean(1), bits[1].mean(1), (bits[0] == bits[1]).double().mean(1)):
        assert (share - 0.5).abs().max() < 5 * 0.5 / math.sqrt(count)
    correlation = torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1]
    assert correlation.abs() < 5 / math.sqrt(count)
