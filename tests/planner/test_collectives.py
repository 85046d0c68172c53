"""Times of messages: by hand where that can be done, in order where not, and against measured clusters."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes.layout import EXPERT_SHARDS, MESH_ORDER, Layout
from fivefold.hardware.cluster import OPERATIONS, UNLIMITED, Cluster, Level, Measured, find_cluster
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.planner.time.collectives import NCCL, Transport, message_time, strides

PLAIN = Transport(base=0.0, near=1.0, far=1.0, crowding=0.0, short_hop=1.0, peer=0.0)
"""Links as they are."""
H100 = find_cluster("dgx-h100")
A100 = find_cluster("dgx-a100")
LLAMA3 = find_cluster("llama3")


def flat(latency: float = 0.0, bandwidth: float = 50e9) -> Cluster:
    return replace(H100, levels=(Level("all", UNLIMITED, bandwidth, latency),))


def at_once(cluster: Cluster) -> Cluster:
    """Its links without latency."""
    return replace(cluster, levels=tuple(replace(level, latency=0.0) for level in cluster.levels))


# --- where ranks are ---------------------------------------------------------------------------------------

degree = st.integers(1, 3)


@settings(deadline=None)
@given(degree, degree, degree, degree, degree)
def test_neighbours_of_a_group_are_a_stride_apart(pp, replicate, shard, cp, tp):
    layout = Layout(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, pp=pp)
    setup = _setup(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, pp=pp)
    found = strides(setup)
    places = [layout.place(rank) for rank in range(layout.ranks)]
    for axis in MESH_ORDER:
        group = [
            rank
            for rank, place in enumerate(places)
            if all(getattr(place, other) == 0 for other in MESH_ORDER if other != axis)
        ]
        assert all(two - one == found[axis] for one, two in pairwise(group))


def test_axes_that_act_as_one_are_as_near_as_the_innermost():
    found = strides(_setup(dp_replicate=2, dp_shard=4, cp=2, tp=8, pp=4, ep=4))
    assert found["tp"] == 1
    assert found["dp_shard*cp"] == 8
    assert found["dp_replicate*cp"] == 8
    assert found["dp_replicate"] == 64
    assert found["pp"] == 128
    assert found["*".join(MESH_ORDER)] == 1
    assert found["ep"] == 8
    assert found[EXPERT_SHARDS] == found[f"dp_replicate*{EXPERT_SHARDS}"] == 32


def test_every_group_of_the_mesh_has_a_stride():
    found = strides(_setup())
    for count in range(1, 6):
        assert all("*".join(axes) in found for axes in combinations(MESH_ORDER, count))


def test_strides_of_many_layouts_at_once():
    found = strides(_setup(tp=np.array([1, 2, 8]), cp=np.array([2, 1, 4])))
    assert np.array_equal(found["dp_shard"], [2, 2, 32])


# --- by hand -----------------------------------------------------------------------------------------------


def test_the_texts_worked_example():
    """7 billion gradients in 16 bits over 8 devices at 50 GB/s: 0.49 s, and 80% with 2 s of compute."""
    seconds = message_time(flat(), "all_reduce", 14e9, 8, 1, replace(PLAIN, tree=0.5))
    assert seconds == pytest.approx(0.49)
    assert 2.0 / (2.0 + seconds) == pytest.approx(0.80, abs=0.005)


def test_a_ring_inside_a_server():
    transport = replace(NCCL, short_hop=1.0)
    seconds = message_time(A100, "all_gather", 8e9, 8, 1, transport)
    assert seconds == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 7e9 / (300e9 * 0.8))


def test_a_ring_leaves_a_server_through_as_many_adapters_as_it_has_ranks_there():
    cluster = at_once(A100)
    whole = message_time(cluster, "reduce_scatter", 16e9, 16, 1, PLAIN)
    half = message_time(cluster, "reduce_scatter", 16e9, 16, 2, PLAIN)
    alone = message_time(cluster, "reduce_scatter", 16e9, 16, 8, PLAIN)
    assert [whole, half, alone] == pytest.approx([15e9 / (8 * 25e9), 15e9 / (4 * 25e9), 15e9 / 25e9])


def test_hops_are_counted_where_they_are():
    """Three servers of eight: 21 hops inside, 2 between; 24 ranks 8 apart: 23 between."""
    tiny = 24.0
    inside, between = 3.4e-6, 14e-6
    transport = replace(PLAIN, tree=1e-9)
    assert message_time(H100, "all_gather", tiny, 24, 1, transport) == pytest.approx(
        21 * inside + 2 * between, rel=1e-4
    )
    assert message_time(H100, "all_gather", tiny, 24, 8, transport) == pytest.approx(23 * between, rel=1e-4)
    assert message_time(H100, "all_reduce", tiny, 24, 8, transport) == pytest.approx(46 * between, rel=1e-4)


def test_a_tree_is_for_small_messages_over_many_ranks():
    deep = message_time(H100, "all_reduce", 8, 8192, 1)
    assert deep < 2 * (7 * 3.4e-6 + 10 * 14e-6) + 20e-6
    assert message_time(H100, "all_gather", 8, 8192, 1) > deep


def test_switches_that_add_up_help_a_full_server_only():
    ring_only = replace(H100, levels=(replace(H100.levels[0], reduces=False), *H100.levels[1:]))
    for ranks, helps in ((2, False), (8, True)):
        faster = message_time(H100, "all_reduce", 1e9, ranks, 1) < message_time(
            ring_only, "all_reduce", 1e9, ranks, 1
        )
        assert faster == helps, ranks
    assert message_time(H100, "all_reduce", 1e9, 16, 1) == message_time(ring_only, "all_reduce", 1e9, 16, 1)


def test_an_all_to_all_sends_what_leaves_the_server_through_one_adapter():
    cluster = at_once(A100)
    assert message_time(cluster, "all_to_all", 8e9, 8, 1, PLAIN) == pytest.approx(7e9 / 300e9)
    assert message_time(cluster, "all_to_all", 16e9, 16, 1, PLAIN) == pytest.approx(8e9 / 25e9)


def test_a_message_to_the_next_stage_takes_the_slowest_way_between_any_two():
    cluster = at_once(A100)
    assert message_time(cluster, "send", 3e9, 2, 4, PLAIN) == pytest.approx(3e9 / 300e9)
    assert message_time(cluster, "send", 3e9, 4, 4, PLAIN) == pytest.approx(3e9 / 25e9)
    assert message_time(cluster, "recv", 3e9, 4, 4, PLAIN) == pytest.approx(3e9 / 25e9)


def test_above_the_pods_the_network_carries_a_seventh():
    cluster = at_once(LLAMA3)
    inside = message_time(cluster, "send", 1e9, 2, 1024, PLAIN)
    across = message_time(cluster, "send", 1e9, 2, 3072, PLAIN)
    assert across == pytest.approx(7 * inside)
    # A ring of 24 neighbours in each pod has as many ways out of it, and does not feel it.
    ring = message_time(cluster, "all_gather", 1e9, 48, 128, PLAIN)
    assert ring == pytest.approx(47 / 48 * 1e9 / 50e9)


# --- whatever the numbers ----------------------------------------------------------------------------------

operations = st.sampled_from([*OPERATIONS, "recv"])
clusters = st.sampled_from([H100, A100, LLAMA3, find_cluster("tpu-v5p"), find_cluster("laptop"), flat(1e-5)])
payloads = st.integers(1, 2**36)
counts = st.integers(2, 4096)


@settings(deadline=None)
@given(clusters, operations, payloads, counts, st.integers(1, 512))
def test_a_larger_message_takes_longer(cluster, operation, payload, ranks, stride):
    one, two = (message_time(cluster, operation, size, ranks, stride) for size in (payload, 2 * payload))
    assert 0 < one <= two < np.inf


@settings(deadline=None)
@given(clusters, operations, payloads, st.sampled_from([2, 4, 8, 64, 512]), st.sampled_from([1, 2, 8, 64]))
def test_ranks_that_are_nearer_are_no_slower(cluster, operation, payload, ranks, stride):
    near, far = (message_time(cluster, operation, payload, ranks, step) for step in (stride, 2 * stride))
    assert near <= far * (1 + 1e-9)


@settings(deadline=None)
@given(
    clusters, operations, st.lists(st.tuples(payloads, counts, st.integers(1, 512)), min_size=1, max_size=5)
)
def test_many_at_once_are_each_as_alone(cluster, operation, cases):
    payload, ranks, stride = (np.array(column) for column in zip(*cases, strict=True))
    together = message_time(cluster, operation, payload, ranks, stride)
    assert isinstance(together, np.ndarray)
    assert list(together) == pytest.approx([message_time(cluster, operation, *case) for case in cases])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_to_send_takes_no_time(operation):
    assert message_time(H100, operation, 1e9, 1, 1) == 0.0
    assert message_time(H100, operation, 0, 8, 1) == 0.0
    assert isinstance(message_time(H100, operation, 1e9, 8, 1), float)


# --- against clusters that were measured -------------------------------------------------------------------

NODES = np.array([1, 2, 4, 8, 16, 32, 64])
ALL_REDUCE = np.array([436, 362, 160, 100, 85, 65, 33])
ALL_GATHER = np.array([250, 185, 119, 69, 55, 28, 11])
"""Hugging Face's H100 cluster: mean bus bandwidth in GB/s by number of servers (Ultra-Scale Playbook)."""


def bus_bandwidth(operation: str, payload: float, transport: Transport):
    ranks = 8 * NODES
    times = 2 if operation == "all_reduce" else 1
    seconds = message_time(H100, operation, payload, ranks, 1, transport)
    return times * payload * (ranks - 1) / ranks / seconds / 1e9


def test_bandwidth_falls_with_servers_as_it_did_at_hugging_face():
    """One message size and one crowding for both rows: see docs/hardware.md."""
    crowded = replace(NCCL, crowding=0.45)
    for operation, measured, allowed in (("all_reduce", ALL_REDUCE, 0.2), ("all_gather", ALL_GATHER, 0.15)):
        error = bus_bandwidth(operation, 47e6, crowded) / measured - 1
        assert np.abs(error).mean() < allowed, (operation, error.round(2))


def test_a_full_server_reaches_what_nccl_reaches():
    """Of 8 H100s: 480 GB/s all-reduced in the switch, 370 in a ring (NVIDIA/nccl-tests#212)."""
    for operation, times, gigabytes in (("all_reduce", 2, 480), ("all_gather", 1, 370)):
        seconds = message_time(H100, operation, 8e9, 8, 1)
        assert times * 8e9 * 7 / 8 / seconds / 1e9 == pytest.approx(gigabytes, rel=0.05)


# --- what was measured goes first --------------------------------------------------------------------------

TABLES = {
    "all_reduce": {
        2: ((1000.0, 1e-4), (1e6, 1e-2)),
        4: ((1000.0, 4e-4), (1e6, 4e-2)),
    }
}
PROBED = Cluster(
    "here", H100.device, (Level("machine", 4, 1e9, 1e-5),), measured=Measured({}, {}, 1e9, 1e-6, TABLES)
)


@pytest.mark.parametrize(
    ("payload", "ranks", "seconds"),
    [
        (1000, 2, 1e-4),
        (1e6, 4, 4e-2),
        (10**4.5, 2, 1e-3),  # half-way between two sizes
        (10**4.5, 4, 4e-3),
        (1000, 3, 1e-4 * 4 ** (np.log(1.5) / np.log(2))),  # between two rank counts
        (10, 2, 1e-4),  # below the table
        (4e6, 2, 4e-2),  # above it, at the last bandwidth
    ],
)
def test_measured_times_are_looked_up(payload, ranks, seconds):
    assert message_time(PROBED, "all_reduce", payload, ranks, 1) == pytest.approx(seconds)


def test_measured_and_modelled_messages_side_by_side():
    """More ranks than were probed, and operations that were not, are left to the levels."""
    wide = replace(PROBED, levels=(Level("machine", 64, 1e9, 1e-5),))
    bare = replace(wide, measured=None)
    ranks = np.array([2, 4, 8])
    found = message_time(wide, "all_reduce", 1e6, ranks, 1)
    assert found == pytest.approx([1e-2, 4e-2, message_time(bare, "all_reduce", 1e6, 8, 1)])
    assert message_time(wide, "send", 1e6, 2, 1) == message_time(bare, "send", 1e6, 2, 1)


def _setup(**degrees) -> Setup:
    return Setup(PRESETS["tiny"], 128, 64, PRECISIONS["fp32"], **degrees)
