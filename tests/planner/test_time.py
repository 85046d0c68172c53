"""The time model: arrays are many scalars, parts add up, and each effect is there, in its direction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fivefold.axes.messages import Traffic
from fivefold.axes.stages import stages
from fivefold.backtest.published import read_runs
from fivefold.backtest.stacks import stack_named
from fivefold.backtest.time_fit import NUMBERS
from fivefold.config import Job, resolve
from fivefold.hardware.cluster import OPERATIONS, TALL, Cluster, Level, Measured, find_cluster
from fivefold.ledger.ledger import Message
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.ledger.work import Work, block_work, matmul
from fivefold.models.flops import flops_per_token
from fivefold.models.presets import PRESETS
from fivefold.planner.placement import most_layers, ours
from fivefold.planner.play.pipelined import stages_of
from fivefold.planner.play.step_time import Breakdown, breakdown, step_times
from fivefold.planner.play.timed import Timed, order_of
from fivefold.planner.time.constants import TIME_CONSTANTS, Constants, peak
from fivefold.planner.time.parts import SLOWDOWN, Costs, left
from fivefold.planner.time.rates import attention_time, matmul_time, work_time
from fivefold.planner.time.stack import OURS, Stack
from fivefold.planner.time.state import matrix_bytes, optimizer_time
from tests.planner.durations import seconds

H100 = find_cluster("dgx-h100")
KNOWN = Constants(matmul=0.65)


def setup_of(model: str = "llama3-8b", **changes: Any) -> Setup:
    base = Setup(PRESETS[model], 8192, 512, PRECISIONS["bf16"], dp_shard=8, zero=1)
    return replace(base, **changes)


def bench_of(
    setup: Setup, cluster: Cluster = H100, stack: Stack = OURS, constants: Constants = KNOWN
) -> Costs:
    return Costs.of(setup, cluster, stack, constants)


def step(setup: Setup, cluster: Cluster = H100, constants: Constants = KNOWN) -> float:
    return seconds(setup, cluster, OURS, constants)


def parts(setup: Setup) -> Breakdown:
    return breakdown(bench_of(setup))


def waited_for(costs: Costs) -> float:
    """Seconds that the data axis' messages add."""
    return breakdown(costs).exposed["dp"]


# --- arrays --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        {"zero": 0},
        {"zero": 1, "schedule": "1f1b"},
        {"zero": 3, "recompute": "full"},
        {"zero": 2, "schedule": "interleaved", "recompute": "selective"},
        {"zero": 3, "cp_kind": "ring"},
    ],
)
@pytest.mark.parametrize("stack", ["fivefold", "nanotron", "internevo", "nemo-fp8", "megatron-deepspeed"])
def test_arrays_are_many_scalars(kind: dict[str, Any], stack: str) -> None:
    choose = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for _ in range(6):
        piped, ringed = "schedule" in kind, "cp_kind" in kind
        rows.append(
            {
                "micro_batch": int(choose.choice([1, 2, 4])),
                "dp_replicate": int(choose.choice([1, 2])),
                "dp_shard": int(choose.choice([2, 8, 16])),
                "cp": int(choose.choice([2, 4])) if ringed else 1,
                "tp": int(choose.choice([1, 2, 8])),
                "pp": int(choose.choice([2, 4])) if piped else 1,
                "ep": 1,
                "virtual_stages": 2 if kind.get("schedule") == "interleaved" else 1,
                "global_batch": 512,
            }
        )
    assert set(rows[0]) == set(NUMBERS)
    arrays: dict[str, Any] = {name: np.array([row[name] for row in rows]) for name in NUMBERS}
    [together] = step_times([bench_of(setup_of(**kind, **arrays), stack=stack_named(stack))])
    for index, row in enumerate(rows):
        alone = bench_of(setup_of(**kind, **row), stack=stack_named(stack))
        [[taking]] = step_times([alone])
        assert together[index] == pytest.approx(taking, rel=1e-12)
        assert breakdown(alone).step_time == pytest.approx(taking, rel=1e-12)


@pytest.mark.parametrize("kind", [{"zero": 3}, {"pp": 4, "schedule": "1f1b"}, {"cp": 2, "cp_kind": "ring"}])
def test_a_step_is_the_sum_of_its_parts(kind: dict[str, Any]) -> None:
    found = parts(setup_of(tp=2, **kind))
    summands = (found.compute, found.bubble, found.optimizer, *found.exposed.values())
    assert found.step_time == pytest.approx(sum(summands))
    assert min(summands) >= -1e-9 * found.step_time


# --- effects -------------------------------------------------------------------------------------------


def test_twice_the_batch_is_twice_the_compute() -> None:
    small, large = (parts(setup_of(global_batch=size)) for size in (256, 512))
    assert large.compute == pytest.approx(2 * small.compute)
    assert large.optimizer == pytest.approx(small.optimizer)


def test_messages_cost_what_their_axis_sends() -> None:
    assert "tp" not in bench_of(setup_of()).block.exposed
    near = bench_of(setup_of(tp=8)).block.exposed["tp"]
    far = bench_of(setup_of(tp=16)).block.exposed["tp"]
    assert 0 < float(near) < float(far)
    fused = bench_of(setup_of(tp=8, tp_overlap=True)).block.exposed["tp"]
    assert float(fused) == pytest.approx(0.3 * float(near))


def test_a_slower_network_never_helps() -> None:
    slow = replace(KNOWN, network=0.2)
    for changes in ({"dp_shard": 64, "zero": 3}, {"tp": 16}, {"pp": 16, "schedule": "1f1b"}):
        setup = setup_of(**changes)
        assert step(setup, constants=slow) > step(setup)


def test_gathers_hide_behind_compute_until_they_are_longer() -> None:
    wide = setup_of(dp_shard=64, zero=3, micro_batch=4)
    exposed = waited_for(bench_of(wide))
    starved = waited_for(bench_of(wide, constants=replace(KNOWN, network=0.01)))
    assert exposed < 0.1 * step(wide)
    assert starved > 0.5 * step(wide) > 10 * exposed


def test_what_runs_behind_compute_costs_little_and_the_rest_is_waited_for() -> None:
    assert left(1.0, 3.0, SLOWDOWN) == pytest.approx(SLOWDOWN)
    assert left(3.0, 1.0, SLOWDOWN) == pytest.approx(2)  # slowed or not, compute is through before


def test_a_bus_that_was_measured_is_not_outrun() -> None:
    nanotron = stack_named("nanotron")
    setup = setup_of(dp_shard=128, zero=1, global_batch=256)
    weights = 4096 * 128_256  # the output projection alone
    slowest = weights * 4 * 2 * 127 / 128 / 85e9  # its gradients, over 16 servers at 85 GB/s
    measured = waited_for(bench_of(setup, stack=nanotron))
    assert measured > slowest
    assert waited_for(bench_of(setup, stack=replace(nanotron, bus={}))) < 0.6 * measured


def test_recomputation_costs_a_forward() -> None:
    none, full = (float(bench_of(setup_of(recompute=mode)).block.total) for mode in ("none", "full"))
    assert 1.25 < full / none < 1.40


def test_kernels_cannot_be_faster_than_they_are_started() -> None:
    tiny = setup_of("gpt2", seq_len=128, global_batch=8, compile=True)
    slow_host = replace(KNOWN, launch=1e-3)
    started = sum(1 for item in block_work(tiny) if item.phase == "forward") * 1e-3
    assert float(bench_of(tiny, constants=slow_host).block.forward) == pytest.approx(started)


def test_a_pipeline_waits_less_with_more_micro_batches_and_more_stages_a_rank() -> None:
    few, many = (parts(setup_of(pp=8, schedule="1f1b", dp_shard=1, global_batch=size)) for size in (16, 128))
    assert few.bubble == pytest.approx(many.bubble)
    assert few.bubble / few.step_time > 0.25 > 0.06 > many.bubble / many.step_time
    cut = parts(setup_of(pp=8, schedule="interleaved", virtual_stages=2, dp_shard=1, global_batch=16))
    assert cut.bubble < 0.65 * few.bubble


def test_attention_takes_as_long_whatever_a_device_is_called() -> None:
    setup, device = setup_of(), H100.device
    named = [
        bench_of(setup, replace(H100, device=replace(device, name=name))).block
        for name in ("H100 SXM", "my H100", "Bare-metal H100")
    ]
    assert len({float(block.total) for block in named}) == 1


def test_the_optimizer_takes_what_its_states_are() -> None:
    def taking(**changes: Any) -> float:
        return float(optimizer_time(bench_of(setup_of(**changes))))

    assert taking(ema=True) == pytest.approx(taking() * 42 / 34)
    assert taking(optimizer="sgd", momentum=0.0) == pytest.approx(taking() * 18 / 34)
    assert taking(precision=PRECISIONS["fp32"]) == pytest.approx(taking() * 32 / 34)
    assert taking(states="bf16") == pytest.approx(taking() * 26 / 34)
    assert taking(states="int8") == pytest.approx(taking() * 22 / 34)


@pytest.mark.parametrize("momentum", [0.95, 0.0])
def test_muon_reads_and_writes_a_rounded_momentum_once(momentum: float) -> None:
    """In place of five times in float32; and its gradient, which is added to in the same pass, once less."""
    plain = setup_of(optimizer="muon", momentum=momentum)
    for states in ("bf16", "int8"):
        spared = matrix_bytes(plain) - matrix_bytes(replace(plain, states=states))
        assert spared == (5 * 4 - 2 * 2 + 4 if momentum else 0)


def test_durations_are_those_of_the_stages() -> None:
    setup = setup_of(pp=4, schedule="1f1b", dp_shard=2)
    costs = bench_of(setup)
    order, timed = order_of(costs, 4, 1, 8), Timed.of(costs)
    found = stages_of(order, timed).durations(order, timed.transfer)
    counts = [load.layers for load in ours(setup, 4)]
    block, head = costs.block, costs.head
    assert found.forward[1] == pytest.approx(counts[1] * float(block.forward))
    assert found.backward_weight[3] == pytest.approx(
        counts[3] * float(block.backward_weight) + float(head.backward_weight)
    )
    assert found.transfer == pytest.approx(float(costs.transfer))


@pytest.mark.parametrize(("pp", "rounds", "schedule"), [(2, 1, "1f1b"), (4, 2, "interleaved"), (2, 2, "zbv")])
def test_stages_are_those_that_the_pipeline_axis_cuts(pp: int, rounds: int, schedule: str) -> None:
    layout = {"pp": pp, "schedule": schedule, "virtual_stages": rounds}
    job = resolve(Job.model_validate({"model": {"preset": "tiny"}, "layout": layout}), pp)
    cut = [sum(part.startswith("blocks") for part in stage) for stage in stages(job)]
    setup = Setup.of(job)
    assert [load.layers for load in ours(setup, pp * rounds)] == cut
    assert max(cut) <= most_layers(setup, ours) <= job.spec.layers


# --- rates ---------------------------------------------------------------------------------------------


def product(rows: int, inner: int, columns: int) -> Work:
    moved = 2.0 * (rows * inner + inner * columns + rows * columns)
    return Work("x", "matmul", "forward", 2.0 * rows * inner * columns, moved, rows, inner, columns)


def reached(rows: int, inner: int, columns: int) -> float:
    work = product(rows, inner, columns)
    return float(work.flops / matmul_time(work, H100.device, "bfloat16", 1.0) / peak(H100.device, "bfloat16"))


def test_products_reach_what_their_shape_allows() -> None:
    assert reached(8192, 8192, 8192) > 0.9
    assert reached(8192, 8192, 8192) > reached(512, 512, 512)
    assert reached(8192, 512, 8192) < 0.9 * reached(8192, 8192, 8192)
    assert reached(8192, 8192 + 8, 8192) < 0.85 * reached(8192, 8192, 8192)
    assert reached(16, 8192, 8192) < 0.1  # bound by reading the weights
    assert all(reached(n, n, n) <= 1.0 for n in (64, 100, 1000, 5000, 16_384))


def test_attention_skips_the_masked_half_and_gets_faster_with_newer_kernels() -> None:
    items = [item for item in block_work(setup_of()) if item.kind == "attention"]
    kernels = ("unfused", "flash-1", "flash-2", "flash-3")
    times = [sum(float(attention_time(i, H100.device, "bfloat16", k, KNOWN)) for i in items) for k in kernels]
    assert times == sorted(times, reverse=True)


def test_a_probed_cluster_uses_its_own_rates() -> None:
    rates = ((1e6, 1e9), (1e12, 1e9))
    measured = Measured({"float32": rates}, {"float32": 1e9}, memory_bandwidth=1e10, launch=0.0)
    cpu = replace(find_cluster("laptop"), measured=measured)
    setup = setup_of("tiny", seq_len=256, global_batch=8, precision=PRECISIONS["fp32"], dp_shard=1)
    found = breakdown(Costs.of(setup, cpu))
    flops = flops_per_token(setup.spec, 256).model * 256 * 8
    assert flops / 1e9 < found.compute < 2 * flops / 1e9


def test_a_product_takes_the_rate_of_its_shape() -> None:
    square, tall = (
        ((2.0 * 64**3, 1e9), (2.0 * 256**3, 4e9)),
        ((2.0 * TALL * 64**3, 5e8), (2.0 * TALL * 256**3, 2e9)),
    )
    measured = Measured({"float32": square}, {"float32": 1e9}, 1e30, 0.0, tall={"float32": tall})
    cluster = replace(find_cluster("laptop"), measured=measured)

    def rate(rows: int, inner: int, columns: int) -> float:
        work = next(matmul("", rows, inner, columns, 4))
        return float(work.flops / work_time(work, cluster, "float32", OURS, KNOWN))

    assert rate(64, 64, 64) == pytest.approx(1e9)
    assert rate(256, 256, 256) == pytest.approx(4e9)
    for shape in ((TALL * 64, 64, 64), (64, TALL * 64, 64), (64, 64, TALL * 64), (10**6, 64, 10**6)):
        assert rate(*shape) == pytest.approx(5e8)
    assert 5e8 < rate(256, 64, 64) < 1e9


def test_a_recomputed_block_ends_before_its_last_product() -> None:
    """Whose result nothing asks for: backward needs its input alone."""
    setup = setup_of(recompute="full")
    mine, whole = (bench_of(setup, stack=s).block for s in (OURS, replace(OURS, early_stop=False)))
    down = next(w for w in block_work(setup_of()) if w.what == "mlp.down" and w.phase == "forward")
    last = float(work_time(down, H100, "bfloat16", OURS, KNOWN))
    assert float(whole.backward) - float(mine.backward) == pytest.approx(last)


def host(**figures: float) -> Cluster:
    """A CPU on which products take no time."""
    fast = ((1.0, 1e30),)
    tables = {name: {4: ((1.0, 1e-3), (1e12, 1e-3))} for name in OPERATIONS}
    still = Measured(
        {"float32": fast}, {"float32": 1e30}, memory_bandwidth=1e30, launch=0.0, collectives=tables
    )
    measured = replace(still, **figures)  # type: ignore[arg-type]
    return replace(find_cluster("laptop"), levels=(Level("machine", 4, 1e9, 0.0),), measured=measured)


def test_a_host_computes_starts_and_sends_one_after_the_other() -> None:
    setup = setup_of("tiny", seq_len=256, global_batch=8, precision=PRECISIONS["fp32"], dp_shard=4)
    nothing, starting, moving = host(), host(launch=1e-3), host(memory_bandwidth=1e6)
    both = host(launch=1e-3, memory_bandwidth=1e6)
    alone = step(setup, nothing)
    added = (step(setup, starting) - alone) + (step(setup, moving) - alone)
    assert step(setup, both) - alone == pytest.approx(added)
    messages = sum(float(np.asarray(m.count)) for m in _all_messages(setup))
    assert alone == pytest.approx(messages * 1e-3)


def test_what_fsdp_takes_around_its_messages_counts_on_a_host() -> None:
    setup = setup_of("tiny", seq_len=256, global_batch=8, precision=PRECISIONS["fp32"], dp_shard=4)
    found = Traffic(setup)
    of_fsdp = (
        setup.spec.layers * len(found.state["block"])
        + len(found.state["embedding"])
        + len(found.state["head"])
    )
    extra = step(setup, host(sharded=1e-2)) - step(setup, host())
    assert extra == pytest.approx(of_fsdp * 1e-2)
    replicated = replace(setup, zero=0, dp_shard=1, dp_replicate=4)
    assert step(replicated, host(sharded=1e-2)) == step(replicated, host())


def _all_messages(setup: Setup) -> list[Message]:
    found = Traffic(setup)
    blocks = [m for _ in range(setup.spec.layers) for m in found.state["block"]]
    return [*blocks, *found.state["embedding"], *found.state["head"], *found.step]


# --- what ships ----------------------------------------------------------------------------------------


def test_no_stack_has_more_than_two_fitted_constants() -> None:
    for device, stacks in TIME_CONSTANTS.table("constants").items():
        for name, constants in stacks.items():
            if name == "typical":
                continue
            changed = {key for key, value in constants.items() if value != getattr(Constants(), key)}
            assert changed <= set(stack_named(name).fits), (device, name)
            assert len(stack_named(name).fits) <= 2


def test_llama3_405b_runs_as_published() -> None:
    """43, 41 and 38% MFU, all three with attention counted in full (the convention of PaLM and Megatron)."""
    runs, _ = read_runs()
    for run, published in zip(runs[:3], (43, 41, 38), strict=True):
        taking = seconds(run.setup, run.cluster, stack_named(run.stack))
        counted = flops_per_token(run.setup.spec, run.setup.seq_len, "full").model
        tokens = run.setup.global_batch * run.setup.seq_len
        mfu = counted * tokens / taking / run.gpus / peak(run.cluster.device, "bfloat16")
        assert abs(100 * mfu - published) < 2


def test_the_optimizer_is_as_fast_as_its_shards_are_small() -> None:
    whole, shards = (float(optimizer_time(bench_of(setup_of(zero=zero)))) for zero in (0, 1))
    assert whole == pytest.approx(8 * shards)
