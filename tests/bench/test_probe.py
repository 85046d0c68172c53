"""The probe: what it measures is there and sound, and what it refuses it refuses at once. Never how fast."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict

import pytest
import torch
from typer.testing import CliRunner

import fivefold.bench.compute as compute
import fivefold.bench.probe as probing
import fivefold.bench.sharded as sharded
import fivefold.bench.timing as timing
from fivefold.bench.described import tables
from fivefold.bench.messages import _Message, group_sizes, measure_messages, median_over_ranks
from fivefold.bench.probe import Probed, agreement, check, probe
from fivefold.bench.timing import seconds_of, window_of
from fivefold.cli import app
from fivefold.comm.world import World
from fivefold.hardware.cluster import OPERATIONS, Cluster, Level, Measured, find_cluster, read_cluster
from fivefold.hardware.devices import this_cpu
from fivefold.training.ranks import run_ranks

CPU = torch.device("cpu")
PAYLOADS = [1024, 4096]


@pytest.fixture
def small(monkeypatch):
    """Sizes that take no time."""
    monkeypatch.setattr(compute, "SIDES", {"cpu": (8, 16, 32)})
    monkeypatch.setattr(compute, "HEADS", {"cpu": (1, 16, 8)})
    monkeypatch.setattr(compute, "LARGE", {"cpu": 2**14})


def test_as_many_times_as_asked():
    calls = []
    assert seconds_of(lambda: calls.append(1), CPU, 5) > 0
    assert len(calls) == 5


def test_a_call_longer_than_a_window_is_timed_once():
    calls = []

    def long() -> None:
        calls.append(1)
        time.sleep(0.04)

    assert window_of(long, CPU) >= 0.04
    assert len(calls) == 1


def test_calls_that_take_turns_are_timed_with_their_waiting():
    """Every tenth call waits long, as for another rank's turn: the median of calls would not see it."""
    calls = []

    def mostly_short() -> None:
        calls.append(1)
        time.sleep(0.01 if len(calls) % 10 == 0 else 0.0001)

    assert window_of(mostly_short, CPU) > 0.0008


def test_a_gpu_is_timed_after_it_has_worked_for_a_while(monkeypatch):
    """Its clock falls when it reaches its limit of power: timed at once it is too fast."""
    calls: list[int] = []
    timed: list[tuple[int, int]] = []

    def by_events(call: timing.Call, count: int) -> float:
        timed.append((len(calls), count))
        for _ in range(count):
            call()
        return 0.001

    monkeypatch.setattr(timing, "_seconds_on_gpu", by_events)
    assert window_of(lambda: calls.append(1), torch.device("cuda")) == 0.001
    (_, tried), (before, count) = timed
    assert (before - tried) * 0.001 == pytest.approx(timing.HEAT)
    assert count * 0.001 == pytest.approx(timing.WINDOW)


def test_one_rank_measures_itself(small):
    cluster = probe(1, lasts=0.0).cluster
    measured = cluster.measured
    assert measured is not None
    assert set(measured.matmul) == set(measured.attention) == {"float32", "bfloat16", "float16", "float64"}
    assert all(len(rates) >= 2 for rates in (*measured.matmul.values(), *measured.tall.values()))
    figures = [rate for rates in measured.matmul.values() for pair in rates for rate in pair]
    figures += [*measured.attention.values(), measured.memory_bandwidth, measured.launch]
    assert all(0 < figure < math.inf for figure in figures)
    assert cluster.device.peak_flops["float32"] == max(rate for _, rate in measured.matmul["float32"])
    assert cluster.device.memory_bandwidth == measured.memory_bandwidth
    assert measured.collectives == {}


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(2, [2]), (3, [3]), (4, [2, 4]), (6, [2, 6]), (8, [2, 4, 8]), (12, [2, 4, 12])]
)
def test_groups_that_are_measured(ranks, sizes):
    assert group_sizes(ranks) == sizes


@pytest.mark.parametrize(("ranks", "groups"), [(2, {2}), pytest.param(4, {2, 4}, marks=pytest.mark.slow)])
def test_ranks_time_every_message_in_groups_of_each_size(ranks, groups):
    found = median_over_ranks(run_ranks(_messages, ranks))
    assert set(found) == set(OPERATIONS)
    for sizes in found.values():
        assert set(sizes) == groups
        for times in sizes.values():
            assert [payload for payload, _ in times] == PAYLOADS
            assert all(0 < seconds < math.inf for _, seconds in times)


def _messages(world: World):
    return measure_messages(world, agreement(world), 0.0, PAYLOADS)


def test_a_message_has_its_payload_on_every_rank_and_ranks_agree():
    """Of a reduce-scatter a rank keeps its share; all other operations end with the whole payload."""
    for sizes, agreed in run_ranks(_sizes, 2):
        assert agreed == 1.0  # on the largest
        assert sizes == {name: 2048 if name == "reduce_scatter" else 4096 for name in OPERATIONS}


def _sizes(world: World) -> tuple[dict[str, int], float]:
    group = torch.distributed.group.WORLD
    assert group is not None
    ends = {name: _Message(name, 4096, group, world.device).prepared()() for name in OPERATIONS}
    return {name: end.nbytes for name, end in ends.items()}, agreement(world)(float(world.rank))


def test_fsdp_costs_something_beyond_its_messages():
    """Told for each message: nothing where messages are said to take longer than all of it."""
    for free, dear in run_ranks(_sharded, 2, (0.0, 100.0)):
        assert 0 < free < 10
        assert dear == 0


def _sharded(world: World, seconds: tuple[float, ...]) -> list[float]:
    told = [{operation: {world.size: {1024: each}} for operation in OPERATIONS} for each in seconds]
    return [sharded.measure_sharded(world, agreement(world), each) for each in told]


def test_operands_differ_from_call_to_call(small):
    bench = compute._Bench(CPU, lambda value: value)
    drawn = bench.operands(torch.float32, (8, 8), (8, 8))
    pairs = [next(drawn) for _ in range(3)]
    assert len({x.data_ptr() for pair in pairs for x in pair}) == 6
    too_large = bench.operands(torch.float64, (2**8, 2**8))
    assert next(too_large)[0].shape == (2**8, 2**8)


def test_the_ranks_median_is_taken():
    by_rank = [{"send": {2: {8: seconds}}} for seconds in (1.0, 5.0, 2.0)]
    assert median_over_ranks(by_rank) == {"send": {2: ((8.0, 2.0),)}}


# --- the command -------------------------------------------------------------------------------------------

MEASURED = Measured(
    matmul={"float32": ((1e6, 1e9), (1e9, 5e10))},
    attention={"float32": 4e9},
    memory_bandwidth=6e9,
    launch=3e-6,
    collectives={"send": {2: ((1024.0, 2e-4), (2.0**24, 3e-2))}},
    tall={"float32": ((1e6, 1e9),)},
)
PROBED = Probed(
    Cluster("this-machine", this_cpu(2), (Level("machine", 2, 1e9, 1e-4),), measured=MEASURED), seconds=12.0
)


@pytest.fixture
def probed(monkeypatch):
    monkeypatch.setattr(probing, "probe", lambda nproc: PROBED)


def test_the_file_is_read_by_whoever_plans(probed, tmp_path):
    path = tmp_path / "here.toml"
    assert CliRunner().invoke(app, ["probe", "--nproc", "2", "--out", str(path)]).exit_code == 0
    assert read_cluster(path).measured == find_cluster(str(path)).measured == MEASURED


def test_json_is_one_object(probed):
    told = json.loads(CliRunner().invoke(app, ["probe", "--json"]).stdout)
    assert told["seconds"] == 12.0
    assert told["ranks"] == 2
    assert told["cluster"]["measured"] == json.loads(json.dumps(asdict(MEASURED)))


def test_people_get_tables(probed):
    told = CliRunner().invoke(app, ["probe"]).stdout
    assert "memory 6.0 GB/s, an operation 3.0 us; each rank computes, in GFLOP/s" in told
    assert ["float32", "1.0", "50.0", "1.0", "4.0"] in [line.split() for line in told.splitlines()]
    assert "1 KiB in 200 us" in told
    assert "16 MiB in 30.0 ms" in told
    assert "measured in 12 s" in told


def test_nothing_measured_has_no_tables():
    assert list(tables(find_cluster("llama3"))) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--nproc", "0"], "0 ranks cannot measure anything"),
        (["--nproc", "-3"], "-3 ranks cannot measure anything"),
        (["--nproc", "100000"], "100000 ranks, but this machine has"),
        (["--out", "/nowhere/at/all.toml"], "there is no folder /nowhere/at"),
        (["--out", "/tmp"], "'/tmp' is a folder"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(options, says):
    result = CliRunner().invoke(app, ["probe", *options, "--json"])
    assert result.exit_code == 2
    problems = json.loads(result.stdout)["problems"]
    assert says in problems[0]["message"]


def test_a_rank_needs_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(probing, "device_kind", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check(2, None) == []
    assert "2 GPU(s)" in check(3, None)[0].message


@pytest.mark.slow
def test_the_whole_of_it():
    probed = probe(2, lasts=20.0)
    assert probed.cluster.measured is not None
    assert set(probed.cluster.measured.collectives) == set(OPERATIONS)
    assert probed.cluster.server == 2
