"""Arithmetic on many layouts at once: each has the answer that it has alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.ledger.numbers import Known, divisors, spread

ROWS = st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=20)


@given(ROWS, ROWS)
@settings(deadline=None)
def test_every_layout_has_the_answer_of_its_own_numbers(
    rows: list[tuple[int, int, int]], more: list[tuple[int, int, int]]
) -> None:
    """Asked twice: what is known from before is still of the numbers that it was asked for."""
    known = Known(lambda asked: asked @ [1, 100, 10_000])
    for some in (rows, more):
        columns = np.array(some).T
        alone = [one + 100 * two + 10_000 * three for one, two, three in some]
        assert known(*columns).tolist() == alone
        assert spread(lambda one, two, three: one + 100 * two + 10_000 * three, *columns).tolist() == alone


@given(st.integers(1, 500), st.integers(1, 500))
def test_divisors_are_all_that_divide(number: int, most: int) -> None:
    assert list(divisors(number, most)) == [n for n in range(1, most + 1) if number % n == 0]
