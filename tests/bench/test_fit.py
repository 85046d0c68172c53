"""Times out of measurements."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.bench.fit import fitted_level, latency_and_bandwidth, rising
from fivefold.hardware.cluster import Cluster
from fivefold.hardware.devices import DEVICES
from fivefold.planner.time.collectives import Transport, message_time

seconds = st.floats(1e-7, 10.0)
tables = st.lists(seconds, min_size=1, max_size=9).map(
    lambda found: tuple((1024.0 * 4**step, value) for step, value in enumerate(found))
)


@settings(deadline=None)
@given(tables)
def test_a_larger_message_never_takes_less(times):
    smooth = rising(times)
    assert [payload for payload, _ in smooth] == [payload for payload, _ in times]
    assert all(one <= two * (1 + 1e-12) for (_, one), (_, two) in pairwise(smooth))


@settings(deadline=None)
@given(tables)
def test_what_is_in_order_stays_as_it_is(times):
    in_order = tuple(zip([p for p, _ in times], sorted(s for _, s in times), strict=True))
    assert [s for _, s in rising(in_order)] == pytest.approx([s for _, s in in_order])


def test_neighbours_out_of_order_meet_in_the_middle():
    smooth = rising(((1.0, 1.0), (2.0, 9.0), (4.0, 4.0), (8.0, 20.0)))
    assert [took for _, took in smooth] == pytest.approx([1.0, 6.0, 6.0, 20.0])
    three = rising(((1.0, 8.0), (2.0, 1.0), (4.0, 1.0)))  # each of them counts as much as the others
    assert [took for _, took in three] == pytest.approx([2.0, 2.0, 2.0])


@settings(deadline=None)
@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e12))
def test_a_line_is_found_again(latency, bandwidth):
    sizes = [bandwidth * latency * 4.0**step for step in range(-3, 4)]
    found = latency_and_bandwidth(tuple((size, latency + size / bandwidth) for size in sizes))
    assert found == pytest.approx((latency, bandwidth), rel=1e-6)


def test_small_messages_count_as_much_as_large_ones():
    """The largest took half as long again as the line says: the latency hardly moves for it."""
    latency, bandwidth = 1e-4, 1e9
    sizes = [1e3 * 4.0**step for step in range(9)]
    times = [latency + size / bandwidth for size in sizes]
    times[-1] *= 1.5
    found, _ = latency_and_bandwidth(tuple(zip(sizes, times, strict=True)))
    assert found == pytest.approx(latency, rel=0.2)


@settings(deadline=None)
@given(tables.filter(lambda times: len(times) > 1))
def test_no_fit_is_negative(times):
    latency, bandwidth = latency_and_bandwidth(times)
    assert latency >= 0
    assert bandwidth > 0


def test_a_level_gives_back_the_gathers_it_was_fitted_to():
    plain = Transport(base=0.0, near=1.0, short_hop=1.0)
    gathers = tuple((size, 2e-4 + size / 3e9) for size in (1e3, 1e5, 1e7))
    cluster = Cluster("here", DEVICES[0], (fitted_level("machine", 4, gathers),))
    for payload, took in gathers:
        assert message_time(cluster, "all_gather", payload, 4, 1, plain) == pytest.approx(took)
