"""The learning rate: where it starts and ends, and that it never jumps the wrong way."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.config import Optimizer
from fivefold.training.learning_rate import learning_rate

settings = st.builds(
    Optimizer,
    lr=st.floats(1e-6, 10),
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
    warmup=st.integers(0, 50),
    decay=st.floats(0.01, 1),
    min_lr=st.floats(0, 1),
)


def rates(optimizer: Optimizer, steps: int) -> list[float]:
    return [learning_rate(optimizer, step, steps) for step in range(1, steps + 1)]


@given(settings, st.integers(1, 120))
def test_it_rises_to_the_peak_and_falls_to_its_floor(optimizer: Optimizer, steps: int) -> None:
    found = rates(optimizer, steps)
    peak, floor = optimizer.lr, optimizer.lr * optimizer.min_lr
    top = peak * (1 + 1e-12)
    assert all(0 <= rate <= top for rate in found)
    warmup, after = found[: optimizer.warmup], found[optimizer.warmup :]
    assert all(a < b for a, b in pairwise(warmup))
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(after))
    assert all(rate >= floor * (1 - 1e-12) for rate in after)
    if after:
        last = peak if optimizer.schedule == "constant" else floor
        assert after[-1] == pytest.approx(last, rel=1e-9, abs=1e-15 * peak)
    if warmup:
        assert warmup[-1] == pytest.approx(peak)


@given(settings, st.integers(1, 120))
def test_the_first_step_learns_something(optimizer: Optimizer, steps: int) -> None:
    """Unless it is the last one too, and the floor is zero."""
    if steps > 1 or optimizer.warmup or optimizer.min_lr or optimizer.schedule == "constant":
        assert rates(optimizer, steps)[0] > 0


def test_warm_up_is_linear_from_its_first_step() -> None:
    optimizer = Optimizer(lr=8.0, warmup=4, schedule="constant")
    assert rates(optimizer, 6) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_cosine_is_half_way_down_in_the_middle() -> None:
    optimizer = Optimizer(lr=1.0, warmup=0, min_lr=0.0, schedule="cosine")
    found = rates(optimizer, 8)
    assert found[3] == pytest.approx(0.5)
    assert found[1] == pytest.approx((1 + 2**-0.5) / 2)
    assert found[7] == pytest.approx(0.0, abs=1e-15)


def test_wsd_stays_and_then_falls_in_a_line() -> None:
    optimizer = Optimizer(lr=1.0, warmup=2, min_lr=0.0, schedule="wsd", decay=0.4)
    assert rates(optimizer, 10) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
