"""Steps of a small model on machines so simple that their time can be worked out by hand.

Products and attention run at one rate, and either nothing else takes time, or only one other thing does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fivefold.axes.messages import Traffic
from fivefold.hardware.cluster import Cluster, Level, Measured, find_cluster
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameter_count
from fivefold.models.spec import ModelSpec
from fivefold.planner.play.step_time import breakdown, step_times
from fivefold.planner.play.timed import Timed
from fivefold.planner.search.bounds import least_with_messages
from fivefold.planner.time.collectives import NCCL
from fivefold.planner.time.parts import SLOWDOWN, Costs
from fivefold.planner.time.rates import HOST_LINK
from tests.planner.durations import seconds

DIM, FFN, LAYERS, WORDS, LENGTH = 256, 512, 4, 64, 512
SPEC = ModelSpec(vocab_size=WORDS, dim=DIM, layers=LAYERS, heads=4, kv_heads=2, ffn=FFN, max_seq_len=LENGTH)
RATE = 1e12
ENDLESS = 1e30

QUERY_AND_OUTPUT, KEY_AND_VALUE, GATE_UP_DOWN = 2 * DIM * DIM, 2 * DIM * DIM // 2, 3 * DIM * FFN
BLOCK_WEIGHTS = QUERY_AND_OUTPUT + KEY_AND_VALUE + GATE_UP_DOWN
BLOCK = LENGTH * 2 * BLOCK_WEIGHTS
ATTENTION = LENGTH * 4 * DIM * LENGTH // 2  # scores and their product with the values, below the diagonal
HEAD = LENGTH * 2 * DIM * WORDS
TRAINED = 3 * (LAYERS * BLOCK + HEAD) + 3.5 * LAYERS * ATTENTION  # backward makes the scores once more
"""Operations of one sequence: forward, and forward and backward."""


def machine(
    rate: float = ENDLESS, bandwidth: float = ENDLESS, memory: float = ENDLESS, latency: float = 0.0
) -> Cluster:
    """GPUs in one server, whose kernels start at once."""
    found = find_cluster("dgx-a100")
    rates = {"bfloat16": ((1.0, rate),)}
    measured = Measured(rates, {"bfloat16": rate}, memory_bandwidth=memory, launch=0.0)
    return replace(found, levels=(Level("server", 64, bandwidth, latency),), measured=measured)


def setup_of(sequences: int, **layout: Any) -> Setup:
    """One sequence a micro-batch."""
    return Setup(SPEC, LENGTH, sequences, PRECISIONS["bf16"], **layout)


def on_the_wire(payload: float, ranks: int, bandwidth: float) -> float:
    """Of a ring without latency."""
    return (ranks - 1) / ranks * payload / (NCCL.near * bandwidth)


# --- compute -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequences", [1, 3, 7])
def test_one_device_runs_its_operations_at_its_rate(sequences: int) -> None:
    assert seconds(setup_of(sequences), machine(RATE)) == pytest.approx(sequences * TRAINED / RATE)


def test_recomputation_runs_all_but_the_last_product_of_a_block_again() -> None:
    again = LAYERS * (BLOCK + ATTENTION - LENGTH * 2 * DIM * FFN)
    found = seconds(setup_of(2, recompute="full"), machine(RATE))
    assert found == pytest.approx(2 * (TRAINED + again) / RATE)


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_a_naive_pipeline_computes_in_turn_and_sends_forward_and_back(pp: int, tp: int) -> None:
    """The stream over each of p - 1 boundaries, there and back again, for each micro-batch."""
    bandwidth = 1e9
    stream = LENGTH * DIM * 2 / tp  # tp ranks have a share each
    transfer = NCCL.base + stream / (NCCL.near * bandwidth)
    setup = setup_of(3, pp=pp, tp=tp, schedule="naive")
    found = breakdown(Costs.of(setup, machine(RATE, bandwidth)))
    assert found.exposed["pp"] == pytest.approx(3 * 2 * (pp - 1) * transfer)
    if tp == 1:  # else its ranks wait for each other too
        assert found.compute + found.bubble == pytest.approx(3 * TRAINED / RATE)


# --- messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequences", [4, 12])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_the_data_axis_sends_takes_its_bytes_over_the_bandwidth(zero: int, sequences: int) -> None:
    """Where computing takes no time: weights in 2 bytes gathered, gradients in 4 reduced."""
    ranks, bandwidth, count = 4, 1e6, sequences // 4
    weights = parameter_count(SPEC)
    blocks = weights - 2 * WORDS * DIM - DIM  # the ends, and the last norm, are still there for backward
    payload = {
        0: 2 * 4 * weights,  # an all-reduce goes round twice
        1: 2 * weights + 4 * weights,
        2: 2 * weights + count * 4 * weights,
        3: count * (2 * weights + 2 * blocks + 4 * weights),
    }[zero]
    layout = {"dp_shard" if zero else "dp_replicate": ranks, "zero": zero}
    found = seconds(setup_of(sequences, **layout), machine(ENDLESS, bandwidth))
    assert found == pytest.approx(on_the_wire(payload, ranks, bandwidth), rel=2e-3)


def test_behind_long_compute_messages_cost_their_slowdown_and_what_nothing_hides() -> None:
    """Weights of the embedding and of the first block come before all compute, for to look a token up takes
    no time; and their gradients go behind all of it.
    """
    ranks, bandwidth = 4, 1e11
    weights = parameter_count(SPEC)
    blocks = weights - 2 * WORDS * DIM - DIM
    first = WORDS * DIM + blocks // LAYERS
    costs = Costs.of(setup_of(ranks, dp_shard=ranks, zero=3), machine(RATE / 100, bandwidth))
    hidden = (2 + 4) * (weights - first) + 2 * blocks
    expected = on_the_wire((2 + 4) * first + SLOWDOWN * hidden, ranks, bandwidth)
    # Each has a start: of the two that are first, and of the others there and back again.
    starts = NCCL.base * (2 * 2 + SLOWDOWN * (2 * LAYERS + LAYERS))
    assert breakdown(costs).exposed["dp"] - float(costs.late) == pytest.approx(expected + starts, rel=1e-6)


@pytest.mark.parametrize(("delay", "fragments", "waits"), [(0, 1, 1), (5, 1, 0.5), (2, 2, 0.6), (8, 2, 0)])
def test_an_average_is_waited_for_where_it_takes_longer_than_its_steps(
    delay: int, fragments: int, waits: float
) -> None:
    """Weights cross once in ten steps, and take as long as all ten of them compute."""
    ranks, bandwidth = 4, 1e6
    crossing = on_the_wire(2 * 4 * parameter_count(SPEC), ranks, bandwidth) / 10
    outer = {"local_steps": 10, "fragments": fragments, "outer_delay": delay, "outer_lr": 0.7}
    costs = Costs.of(setup_of(ranks, dp_replicate=ranks, **outer), machine(TRAINED / crossing, bandwidth))
    found = breakdown(costs)
    assert found.step_time == pytest.approx((1 + waits) * crossing, rel=2e-3)
    assert found.exposed["dp"] == pytest.approx(waits * crossing, rel=2e-3, abs=2e-3 * crossing)
    assert float(step_times([costs])[0].item()) == pytest.approx(found.step_time, rel=1e-9)
    assert float(least_with_messages(costs, Timed.of(costs))) <= found.step_time * (1 + 1e-9)


def test_the_stages_of_a_rank_gather_and_reduce_one_after_the_other() -> None:
    """Of the last rank: two of the four layers, and the head. Sequences are short: the stream is small."""
    bandwidth = 1e6
    layout: dict[str, Any] = {"pp": 2, "virtual_stages": 2, "schedule": "interleaved", "dp_shard": 2}
    setup = replace(setup_of(4, zero=1, **layout), seq_len=8)
    held = 2 * BLOCK_WEIGHTS + WORDS * DIM
    least = on_the_wire((2 + 4) * held, 2, bandwidth)
    assert least < seconds(setup, machine(ENDLESS, bandwidth)) < 1.1 * least


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"cp": 2, "cp_kind": "ring"},
        {"cp": 4, "cp_kind": "ring"},
        {"cp": 2, "cp_kind": "ulysses"},
        {"cp": 2, "cp_kind": "allgather"},
    ],
)
def test_a_block_waits_for_each_of_its_messages_where_nothing_hides_them(layout: dict[str, Any]) -> None:
    bandwidth = 1e6
    setup = setup_of(1, **layout)
    found = Costs.of(setup, machine(ENDLESS, bandwidth)).block
    ranks = max(setup.tp, setup.cp)
    sent = 0.0
    for message in Traffic(setup).block:  # each message as ranks send it: tests/axes/test_account_splits.py
        if message.operation == "send":
            sent += float(message.count * message.payload) / (NCCL.near * bandwidth)
        elif message.operation != "recv":  # what comes while one sends
            sent += on_the_wire(float(message.count * message.payload), int(ranks), bandwidth)
    [(_, exposed)] = found.exposed.items()
    assert float(exposed) == pytest.approx(sent, rel=1e-3)
    assert float(found.total) == pytest.approx(sent, rel=1e-3)


def test_tensor_parallel_ranks_send_their_stream_four_times_each_way() -> None:
    stream = LENGTH * DIM * 2
    found = Costs.of(setup_of(1, tp=2), machine(ENDLESS, 1e6)).block.exposed["tp"]
    assert float(found) == pytest.approx(8 * on_the_wire(stream, 2, 1e6), rel=1e-3)


def test_partial_gradients_of_all_layers_are_summed_over_tp_behind_backward() -> None:
    """Of two norms a layer, and the last one, in 4 bytes."""
    late = Costs.of(setup_of(1, tp=2), machine(ENDLESS, 1e6)).late
    norms = (2 * LAYERS + 1) * DIM * 4
    assert float(late) == pytest.approx(2 * on_the_wire(norms, 2, 1e6), rel=1e-2)


def test_the_slowest_rank_s_messages_are_those_that_are_waited_for() -> None:
    """With two layers on two ranks, the head's rank has the same block and the head's messages too."""
    spec = SPEC.model_copy(update={"layers": 2, "vocab_size": 8192})
    setup = replace(setup_of(3, tp=2, pp=2, schedule="1f1b"), spec=spec)
    costs = Costs.of(setup, machine(RATE, 1e9))
    each = float(costs.block.exposed["tp"]) + float(costs.head.exposed["tp"])
    assert float(costs.head.exposed["tp"]) > 0
    assert breakdown(costs).exposed["tp"] == pytest.approx(3 * each)


# --- the update --------------------------------------------------------------------------------------------


OPTIMIZED = pytest.mark.parametrize(
    ("layout", "shards"),
    [
        ({}, 1),
        ({"dp_replicate": 4}, 1),
        ({"dp_shard": 4, "zero": 1}, 4),
        ({"dp_shard": 2, "cp": 2, "cp_kind": "ring", "zero": 1}, 4),
        ({"dp_shard": 2, "dp_replicate": 2, "zero": 3}, 2),
        ({"tp": 2}, 2),
        ({"dp_shard": 2, "tp": 2, "zero": 2}, 4),
    ],
)


@OPTIMIZED
def test_states_in_host_memory_travel_while_the_optimizer_updates(
    layout: dict[str, Any], shards: int
) -> None:
    """Moments both ways at once, and masters where they are a copy: the longer of that and of the update."""
    memory, link = 1e12, 1e9
    plain = machine(memory=memory)
    cluster = replace(plain, device=replace(plain.device, host_bandwidth=link))
    costs = Costs.of(setup_of(4, **layout, offload=True), cluster)
    each = 12 if not layout.get("zero") else 8
    expected = each * parameter_count(SPEC) / shards / (HOST_LINK * link)
    assert breakdown(costs).optimizer == pytest.approx(expected, rel=0.01)
    fast = replace(plain, device=replace(plain.device, host_bandwidth=1e15))
    assert breakdown(replace(costs, cluster=fast)).optimizer == pytest.approx(
        breakdown(Costs.of(setup_of(4, **layout), plain)).optimizer
    )


@OPTIMIZED
def test_the_optimizer_reads_and_writes_what_a_rank_has_of_the_states(
    layout: dict[str, Any], shards: int
) -> None:
    """Master weights and two moments both ways, gradients twice, and weights in 16 bits: 34 bytes each."""
    memory = 1e9
    found = breakdown(Costs.of(setup_of(4, **layout), machine(memory=memory))).optimizer
    assert found == pytest.approx(34 * parameter_count(SPEC) / shards / memory, rel=0.01)
