"""Searched schedules: complete, within their memory, and no worse than those drawn by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.planner.play.computations import Durations
from fivefold.planner.play.timeline import play, played
from fivefold.planner.play.zero_bubble import search
from fivefold.schedules import Action
from tests.planner.durations import equal


def most_memory(order: list[Action], kept: float) -> float:
    """The most micro-batches' worth of activations, when `kept` of each stays after its backward-input."""
    change = {"forward": 1.0, "backward-input": kept - 1, "backward-weight": -kept}
    level = most = 0.0
    for action in order:
        level += change[action.kind]
        most = max(most, level)
    return most


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, Durations, float]:
    ranks = draw(st.integers(1, 6))
    times = st.lists(st.floats(0, 5), min_size=ranks, max_size=ranks)
    f, b, w = (tuple(draw(times)) for _ in range(3))
    durations = Durations(f, b, w, draw(st.floats(0, 10)))
    kept = draw(st.sampled_from((0.0, 0.3, 0.5, 1.0)))
    return draw(st.sampled_from([1, 2])), ranks, draw(st.integers(1, 14)), durations, kept


@given(cases())
@settings(deadline=None, max_examples=100)
def test_every_rank_does_everything_once_and_within_its_memory(
    case: tuple[int, int, int, Durations, float],
) -> None:
    limit, ranks, count, durations, kept = case
    orders = search(*case)
    for rank, order in enumerate(orders):
        assert Counter(order) == Counter(
            Action(kind, rank, number)
            for kind in ("forward", "backward-input", "backward-weight")
            for number in range(count)
        )
        assert most_memory(order, kept) <= limit * ranks + 1e-9
    play(orders, durations)  # raises where ranks would wait for each other


@pytest.mark.parametrize(("searched", "drawn"), [("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")])
def test_never_slower_than_the_handcrafted_one(searched: str, drawn: str) -> None:
    for ranks, count in ((2, 8), (4, 12), (8, 24)):
        for f, b, w in ((1, 1, 1), (2, 1, 1), (1, 2, 0.5), (3, 3, 2)):
            durations = equal(ranks, 1, f, b, w, 0.1)
            found = played(searched, ranks, count, 1, durations).step_time
            assert found <= played(drawn, ranks, count, 1, durations).step_time * 1.001, (ranks, f, b, w)


def test_more_memory_is_faster() -> None:
    durations = equal(8, 1, 18.5, 18.1, 9.3, 0.6)
    bubbles = [played(schedule, 8, 32, 1, durations).bubble for schedule in ("zb-1p", "zb-2p")]
    assert bubbles[0] > 0.1 > 0.01 > bubbles[1]
    # Where all activations stay until the weight half, less work can wait for the end.
    assert play(search(2, 8, 32, durations, 1.0), durations).bubble > 0.05
