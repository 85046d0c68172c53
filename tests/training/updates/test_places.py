"""Global indices of a block's elements: those that the whole has there."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.training.updates.places import Places


@st.composite
def blocks(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of a block, and the shape of the whole."""
    whole = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    offset = tuple(draw(st.integers(0, size - 1)) for size in whole)
    cut = draw(st.lists(st.booleans(), min_size=len(whole), max_size=len(whole)))
    offset = tuple(o if c else 0 for o, c in zip(offset, cut, strict=True))
    shape = tuple(
        draw(st.integers(1, size - o)) if c else size for o, size, c in zip(offset, whole, cut, strict=True)
    )
    return offset, shape, whole


@given(block=blocks(), data=st.data())
def test_indices_of_a_block_are_those_of_the_whole(block: Any, data: Any) -> None:
    offset, shape, whole = block
    places = Places.of_slab(offset, shape, whole)
    every = torch.arange(math.prod(whole)).view(whole)
    expected = every[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].flatten()
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    assert torch.equal(places.indices(start, stop, torch.device("cpu")), expected[start:stop])
    assert math.prod(count for count, _ in places.runs) == len(expected)
    assert places.runs[-1][1] == 1
    assert len(places.runs) <= 1 + sum(n < w for n, w in zip(shape, whole, strict=True))


def test_rows_of_a_matrix_are_one_run_and_columns_are_not() -> None:
    assert Places.of_slab((4, 0), (3, 10), (20, 10)) == Places(40, ((30, 1),))
    assert Places.of_slab((0, 4), (20, 3), (20, 10)) == Places(4, ((20, 10), (3, 1)))
    assert Places.of_slab((2, 1, 0), (2, 3, 5), (8, 6, 5)) == Places(65, ((2, 30), (15, 1)))


def test_more_elements_than_32_bits_count() -> None:
    places = Places.of_slab((2**20, 0), (1, 2), (2**21, 2**13))
    assert places.indices(0, 2, torch.device("cpu")).tolist() == [2**33, 2**33 + 1]
