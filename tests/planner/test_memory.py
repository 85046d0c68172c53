"""The memory model: exact where the ledger is, one for all layouts at once, and near published runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes.layout import Place
from fivefold.backtest.described_memory import impossible, memory_of
from fivefold.backtest.memory_fit import LIKELY, fit, held_out, predict
from fivefold.backtest.published import PublishedRun, read_runs
from fivefold.backtest.stacks import MEMORY_CONSTANTS, memory_constants, memory_profile, stack_named, stacks
from fivefold.hardware.cluster import find_cluster
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.planner.memory.fullest_rank import (
    GIB,
    Memory,
    MemoryConstants,
    chance_of_running_out,
    counted_on,
    fits,
    memory,
    usable_gib,
)
from fivefold.planner.memory.moments import in_flight, moments
from fivefold.planner.memory.our_tensors import ours, rank_tensors
from fivefold.planner.memory.rank_memory import RankMemory
from fivefold.planner.time.stack import LEDGER, OURS
from fivefold.replay.account import account
from fivefold.schedules import SCHEDULES, Schedule
from fivefold.schedules.actions import Action
from tests.axes import layouts
from tests.cases import Case
from tests.planner.stack_memory import memory_under

H100 = find_cluster("dgx-h100")


def setup(model: str = "llama3-8b", **numbers: Any) -> Setup:
    given: dict[str, Any] = {
        "spec": PRESETS[model],
        "seq_len": 4096,
        "global_batch": 256,
        "precision": PRECISIONS["bf16"],
    }
    return Setup(**given | numbers)


# --- our own program -------------------------------------------------------------------------------------

RANDOM = sorted(name for name, split in layouts.SPLITS.items() if split.group == "at random")
OTHERS = sorted(layouts.SPLITS.keys() - set(RANDOM))


@pytest.mark.parametrize("name", [*RANDOM, *OTHERS[::4]])
def test_what_is_held_is_what_the_ledger_says(name: str) -> None:
    job = layouts.SPLITS[name].case().job()
    for tensors in ours(Setup.of(job)):
        ledger = account(job, Place(pp=int(tensors.number)))
        assert tensors.gradients == ledger.rest("gradients")
        assert tensors.states == ledger.rest("states")
        if job.layout.zero != 3:
            assert tensors.weights == ledger.peak("weights")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_is_held_of_experts_is_what_the_ledger_says(precision: str, zero: int) -> None:
    layout = {"dp_shard": 4, "ep": 2} if zero else {"dp_replicate": 2, "cp": 2, "ep": 2}
    training = {"precision": precision, "routing": "balanced"}
    job = layouts.split("", "experts", layout | {"zero": zero}, training).case().job()
    tensors, ledger = ours(Setup.of(job))[0], account(job)
    assert tensors.gradients == ledger.rest("gradients")
    assert tensors.states == ledger.rest("states")


@pytest.mark.parametrize("layout", [{}, {"zero": 1}, {"zero": 3}, {"tp": 2}, {"pp": 2}])
@pytest.mark.parametrize("more", [{"ema": 0.9}, {"states": "bf16"}, {"name": "sgd"}])
def test_what_lies_in_host_memory_is_what_the_ledger_says(
    layout: dict[str, int], more: dict[str, Any]
) -> None:
    """And there is as much less on the device; where that is the host, it is all one memory."""
    training = {"precision": "bf16", "micro_batch": 2}
    job, plain = (
        Case("", 2, layout, training, more | {"offload": offload}).job() for offload in (True, False)
    )
    for one, other in zip(ours(Setup.of(job)), ours(Setup.of(plain)), strict=True):
        ledger = account(job, Place(pp=int(one.number)))
        assert one.states == ledger.rest("states")
        assert one.host == ledger.on_host > 0
        assert one.states + one.host == other.states
        assert other.host == 0
    for one, other in zip(ours(Setup.of(job), "cpu"), ours(Setup.of(plain), "cpu"), strict=True):
        assert (one.states, one.host) == (other.states, 0)
    assert 0 <= ledger.peak("states") - ledger.rest("states") <= 3 * 16 * (1 << 23)


def test_a_pipeline_keeps_tensors_to_receive_into() -> None:
    """One for every micro-batch and direction, there from one step to the next."""
    common: dict[str, Any] = {"pp": 2, "schedule": "1f1b", "recompute": "full"}
    few, many = (rank_tensors(setup(global_batch=count, **common), 0) for count in (8, 64))
    stream = 4096 * PRESETS["llama3-8b"].dim * 2
    assert many.allocated - few.allocated == 56 * stream


def test_the_ranks_that_are_looked_at_are_those_of_the_pipeline() -> None:
    """Of many layouts at once, each of these ranks is what it is alone."""
    common: dict[str, Any] = {"schedule": "interleaved", "virtual_stages": 2, "zero": 3, "dp_shard": 4}
    together = ours(setup(pp=np.array([2, 4]), **common))
    for index, pp in enumerate((2, 4)):
        for tensors in together:
            rank = int(np.asarray(tensors.number)[index])
            alone = rank_tensors(setup(pp=pp, **common), rank)
            assert np.asarray(tensors.allocated)[index] == pytest.approx(alone.allocated, rel=1e-9)


def most_kept(order: Iterable[Action]) -> tuple[int, int]:
    """The most (stage, micro-batch) pairs between their forward and their weights' gradients; and the most
    where one that is between the two halves of its backward counts twice.
    """
    kept = half_done = most = fullest = 0
    for action in order:
        kept += action.kind == "forward"
        half_done += action.kind == "backward-input"
        most, fullest = max(most, kept), max(fullest, kept + half_done)
        kept -= action.kind in ("backward", "backward-weight")
        half_done -= action.kind == "backward-weight"
    return most, fullest


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([schedule for schedule in SCHEDULES.values() if schedule.order is not None]),
    st.integers(2, 9),
    st.integers(1, 40),
    st.integers(2, 4),
    st.data(),
)
def test_micro_batches_in_flight_are_those_of_the_schedule(
    schedule: Schedule, ranks: int, count: int, virtual: int, data: st.DataObject
) -> None:
    virtual = schedule.stages or virtual
    if not schedule.allows(ranks, count):
        return
    rank = data.draw(st.integers(0, ranks - 1))
    order = schedule.computed(rank, ranks, count, virtual)
    most, fullest = most_kept(order)
    assert in_flight(schedule.name, ranks, rank, count, virtual) == most
    if rank > 0:  # the first stage has no inputs to differentiate by
        when = moments(schedule.name, ranks, rank, count, virtual, splits=True)
        assert (when.live + when.half).sum(axis=1).max() == fullest


LAYOUTS = st.tuples(
    st.sampled_from([1, 2, 4]),  # micro_batch
    st.sampled_from([1, 2]),  # dp_replicate
    st.sampled_from([1, 2, 4]),  # dp_shard
    st.sampled_from([1, 2]),  # cp
    st.sampled_from([1, 2, 4, 8]),  # tp
    st.sampled_from([1, 2, 4]),  # pp
)
NAMES = ("micro_batch", "dp_replicate", "dp_shard", "cp", "tp", "pp")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(LAYOUTS, min_size=1, max_size=6),
    st.sampled_from([("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("gpipe", 1)]),
    st.integers(0, 3),
    st.sampled_from(["none", "full", "selective", "sqrt", "every-2"]),
    st.sampled_from(["fivefold", "nanotron", "megatron-deepspeed", "torchtitan"]),
    st.sampled_from(["llama3-8b", "gpt2-xl"]),
)
def test_many_layouts_at_once_are_each_of_them(
    rows: list[tuple[int, ...]],
    schedule: tuple[str, int],
    zero: int,
    recompute: str,
    stack: str,
    model: str,
) -> None:
    if stack != "fivefold" and recompute not in ("none", "full", "selective"):
        recompute = "none"
    if model == "gpt2-xl":  # 25 heads
        rows = [(*row[:4], 1, row[5]) for row in rows]
    columns = dict(zip(NAMES, np.array(rows).T, strict=True))
    name, virtual = schedule
    common: dict[str, Any] = {
        "zero": zero,
        "schedule": name,
        "recompute": recompute,
        "cp_kind": "ring",
        "seq_len": 1024,
    }
    many = setup(model, **columns, **common, virtual_stages=np.where(columns["pp"] > 1, virtual, 1))
    together = memory_under(many, H100, stack_named(stack))
    for place, row in enumerate(rows):
        numbers = dict(zip(NAMES, row, strict=True))
        one = setup(model, **numbers, **common, virtual_stages=virtual if numbers["pp"] > 1 else 1)
        alone = memory_under(one, H100, stack_named(stack))
        for name in (*(field.name for field in fields(RankMemory)), "allocated", "reserved", "device"):
            every = np.broadcast_to(getattr(together, name), len(rows))
            assert every[place] == pytest.approx(getattr(alone, name), rel=1e-9), name
            last = np.broadcast_to(getattr(together.ranks[-1], name), len(rows))
            assert last[place] == pytest.approx(getattr(alone.ranks[-1], name), rel=1e-9)


def test_layouts_that_differ_in_ep_differ_in_memory() -> None:
    degrees = [1, 2, 4, 8]
    common: dict[str, Any] = {"seq_len": 256, "dp_shard": 8, "zero": 3}
    together = memory(setup("tiny-moe", ep=np.array(degrees), **common), H100)
    alone = [memory(setup("tiny-moe", ep=ep, **common), H100) for ep in degrees]
    for name in ("gradients", "states", "activations", "transient", "allocated"):
        assert getattr(together, name) == pytest.approx([getattr(one, name) for one in alone], rel=1e-9)
    assert len({one.activations for one in alone}) > 1


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_larger_batches_need_more_and_recomputation_less(batch: int, tp: int, zero: int, pp: int) -> None:
    numbers: dict[str, Any] = {"tp": tp, "pp": pp, "dp_shard": 4, "zero": zero, "schedule": "1f1b"}
    small = memory(setup(micro_batch=batch, **numbers), H100)
    large = memory(setup(micro_batch=2 * batch, **numbers), H100)
    again = memory(setup(micro_batch=batch, recompute="full", **numbers), H100)
    assert large.allocated > small.allocated
    assert again.activations < small.activations
    for needed in (small, large, again):
        assert 0 < needed.allocated <= needed.reserved <= needed.device
        parts = (needed.weights, needed.gradients, needed.states, needed.activations, needed.transient)
        assert needed.allocated <= sum(parts) * (1 + 1e-9)


def test_zero_shards_what_it_says() -> None:
    held = [memory(setup(dp_shard=8, zero=zero), H100) for zero in range(4)]
    assert held[0].states == pytest.approx(8 * held[1].states, rel=1e-3)
    assert held[1].gradients == held[2].gradients == pytest.approx(held[0].gradients / 8, rel=1e-3)
    assert held[2].weights > 0 == held[3].weights
    assert held[0].allocated > held[1].allocated > held[2].allocated > held[3].allocated


def test_the_first_stage_of_a_pipeline_is_the_fullest_and_the_last_has_the_logits() -> None:
    needed = memory(setup(pp=4, schedule="1f1b"), H100)
    assert needed.number == 0
    first, middle, *_, last = needed.ranks
    assert first.allocated > middle.allocated > last.allocated
    assert last.transient > middle.transient
    everything = memory(setup(pp=4, schedule="gpipe"), H100)
    assert everything.ranks[-1].activations > 10 * last.activations


def test_a_processor_has_neither_a_driver_nor_a_caching_allocator() -> None:
    needed = memory(setup("tiny", seq_len=64, global_batch=8), find_cluster("laptop"))
    assert needed.buffers == 0
    assert needed.allocated == needed.reserved == needed.device


def test_every_axis_that_splits_anything_has_a_communicator() -> None:
    """One of all ranks, one of those that share gradients, one of each axis; beside the driver's context."""
    layouts: list[dict[str, Any]] = [{}, {"dp_replicate": 8}, {"dp_replicate": 2, "tp": 2}]
    layouts.append({"dp_replicate": 2, "tp": 2, "cp": 2, "pp": 2, "cp_kind": "ring", "schedule": "1f1b"})
    buffers = [float(memory(setup(**layout), H100).buffers) for layout in layouts]
    assert buffers[0] > 0
    each = (buffers[1] - buffers[0]) / 2
    assert [round((more - buffers[0]) / each) for more in buffers] == [0, 2, 3, 5]
    assert each > 0


def test_an_allocator_reserves_more_than_is_allocated() -> None:
    needed = memory(setup(), H100)
    assert needed.allocated < needed.reserved < needed.device
    assert needed.device - needed.reserved == pytest.approx(needed.buffers)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zbv"])
@pytest.mark.parametrize("pp", [2, 4, 5])
def test_no_rank_of_a_pipeline_is_fuller_than_the_fullest(schedule: str, pp: int) -> None:
    """Layers do not divide: under gpipe, which keeps all micro-batches, a longer stage is the fullest."""
    virtual = SCHEDULES[schedule].usual_stages
    spec = PRESETS["llama3-8b"].model_copy(update={"layers": 13, "vocab_size": 4096})
    layout: dict[str, Any] = {"pp": pp, "schedule": schedule, "virtual_stages": virtual}
    one = replace(setup(global_batch=10, **layout), spec=spec)
    fullest = max(float(rank_tensors(one, rank).allocated) for rank in range(pp))
    assert float(memory(one, H100).allocated) == pytest.approx(fullest)


# --- running out -----------------------------------------------------------------------------------------


def needing(gib: float, spread: float = 0.1) -> Memory:
    needed = memory(setup(), H100)
    return replace(needed, buffers=gib * GIB - needed.reserved, spread=spread)


def test_the_chance_of_running_out_is_a_half_where_all_is_needed() -> None:
    room = usable_gib(H100.device)
    assert 78 < room < 80
    assert chance_of_running_out(needing(room), H100) == pytest.approx(0.5, abs=1e-6)
    assert chance_of_running_out(needing(room * np.exp(0.1)), H100) == pytest.approx(0.841, abs=1e-3)
    assert chance_of_running_out(needing(room / 2), H100) < 1e-6
    assert chance_of_running_out(needing(room * 2), H100) > 1 - 1e-6


def test_what_can_be_counted_on_runs_out_once_in_ten() -> None:
    for spread in (0.05, 0.2):
        most = counted_on(H100, spread)
        assert chance_of_running_out(needing(most, spread), H100) == pytest.approx(0.1, abs=1e-6)
        assert fits(needing(most * 0.999, spread), H100)
        assert not fits(needing(most * 1.001, spread), H100)


@given(st.floats(1, 400), st.floats(1, 400), st.floats(0.03, 0.5))
def test_more_is_never_safer(one: float, other: float, spread: float) -> None:
    less, more = sorted((one, other))
    chances = [float(chance_of_running_out(needing(gib, spread), H100)) for gib in (less, more)]
    assert 0 <= chances[0] <= chances[1] + 1e-7 <= 1 + 2e-7


# --- other stacks ----------------------------------------------------------------------------------------

ULTRASCALE = {1: (16, 2048, 8192), 3: (28, 3072, 8192), 8: (32, 4096, 14336)}


def nanotron(billions: int, **numbers: Any) -> Setup:
    layers, dim, ffn = ULTRASCALE[billions]
    spec = ModelSpec(
        vocab_size=131_072, dim=dim, layers=layers, heads=32, ffn=ffn, max_seq_len=4096, tied=billions < 4
    )
    return replace(setup(**numbers), spec=spec, schedule="1f1b")


@pytest.mark.parametrize(
    ("billions", "pp", "runs"), [(1, 8, True), (1, 16, False), (3, 16, True), (3, 32, False), (8, 32, True)]
)
def test_a_pipeline_with_an_idle_rank_does_not_run(billions: int, pp: int, runs: bool) -> None:
    """As the published runs of these depths did, or did not."""
    reason = impossible(nanotron(billions, pp=pp), stack_named("nanotron"))
    assert (reason is None) == runs
    assert runs or "without any part" in str(reason)


def test_a_pipeline_needs_as_many_micro_batches_as_its_schedule_asserts() -> None:
    stack = stack_named("nanotron")
    assert impossible(nanotron(8, pp=8, micro_batch=37), stack) is not None  # 6 micro-batches
    assert impossible(nanotron(8, pp=8, micro_batch=36), stack) is None  # 7


def test_every_stack_names_a_description_of_its_memory() -> None:
    for stack in stacks().values():
        assert stack.memory == LEDGER or memory_profile(stack.memory).name == stack.memory
    assert OURS.memory == stack_named("fivefold-fp8").memory == LEDGER
    assert stack_named("nanotron-fp8").memory == "nanotron"
    assert stack_named("megatron-moe").memory == "megatron-core"  # not what its name begins with


def test_scores_are_written_down_in_memory_where_they_are_in_time() -> None:
    for stack in stacks().values():
        if stack.memory != LEDGER:
            unfused = stack.attention == "unfused"
            assert (memory_profile(stack.memory).scores > 0) == unfused, stack.name


# --- published runs --------------------------------------------------------------------------------------


@cache
def published() -> list[PublishedRun]:
    return read_runs()[0]


def error(stack: str, predictions: dict[int, Any]) -> float:
    rows = [run for run in published() if run.stack == stack and run.ok and run.memory_gib]
    assert len(rows) > 60
    return float(np.mean([abs(predictions[run.row].gib / run.memory_gib - 1) for run in rows]))  # type: ignore[operator]


def out_of_memory(predictions: dict[int, Any]) -> tuple[float, float]:
    """Precision and recall of "does not fit" on the Ultrascale rows."""
    rows = [run for run in published() if run.stack == "nanotron" and run.row in predictions]
    said = {run.row for run in rows if not predictions[run.row].fits}
    failed = {run.row for run in rows if not run.ok}
    return len(said & failed) / len(said), len(said & failed) / len(failed)


def test_published_memory_is_near() -> None:
    rows = [run for run in published() if run.stack in ("nanotron", "megatron-deepspeed")]
    predictions = {run.row: predict(run) for run in rows}
    assert error("nanotron", predictions) < 0.11
    assert error("megatron-deepspeed", predictions) < 0.05
    precision, recall = out_of_memory(predictions)
    assert precision > 0.95
    assert recall > 0.91


@pytest.mark.slow
def test_published_memory_is_near_where_a_model_was_never_seen() -> None:
    predictions = held_out(published())
    assert error("nanotron", predictions) < 0.11
    assert error("megatron-deepspeed", predictions) < 0.05
    precision, recall = out_of_memory(predictions)
    assert precision > 0.95
    assert recall > 0.91


def test_at_most_two_constants_are_fitted() -> None:
    for devices in MEMORY_CONSTANTS.table("constants").values():
        for constants in devices.values():
            assert len(constants) <= 2


def test_fitting_finds_the_constants_that_made_the_figures(tmp_path: Any) -> None:
    true = MemoryConstants(base=0.7, gathered=0.25)
    runs = [run for run in published() if run.stack == "nanotron" and run.ok and run.memory_gib][::40]
    made = [replace(run, memory_gib=predict(run, true).gib) for run in runs]
    found = fit(made)
    assert found["spread"] == {"nanotron": {"H100 SXM": 0.03}}  # never less
    file = replace(MEMORY_CONSTANTS, path=tmp_path / "constants.json")
    assert file.table("constants") == {}
    file.write(found)  # and what was read before is forgotten
    assert file.table("constants") == {"nanotron": {"H100 SXM": {"base": 0.7, "gathered": 0.25}}}


def test_a_device_without_fitted_constants_takes_those_of_another() -> None:
    assert memory_constants("B200", "nanotron") == memory_constants("H100 SXM", "nanotron")
    assert memory_constants("B200", "megatron") == MemoryConstants()


def test_a_run_that_cannot_be_is_said_not_to_fit() -> None:
    """16 layers over 16 ranks, in little memory."""
    failed = (run for run in published() if run.stack == "nanotron" and not run.ok)
    run = next(
        run for run in failed if run.setup.pp == 16 and run.setup.tp == 4 and run.setup.micro_batch == 1
    )
    found = predict(run)
    assert not found.fits
    assert found.reason is not None
    assert found.chance < LIKELY


def test_gradients_that_wait_for_the_end_of_backward_outweigh_small_activations() -> None:
    stack, constants = stack_named("nanotron"), MemoryConstants(base=0.0)
    needed = memory_of(replace(nanotron(8), seq_len=64), stack, constants)
    assert needed.weights / 2 == needed.gradients / 4
    assert needed.activations + needed.transient == pytest.approx(needed.weights)  # 2 bytes a weight as well


def test_logits_of_a_large_vocabulary_weigh_on_the_last_rank() -> None:
    stack, constants = stack_named("nanotron"), MemoryConstants()
    needed = memory_of(nanotron(1, pp=2, micro_batch=8), stack, constants)
    logits = 8 * 4096 * 131_072
    first, *_, last = needed.ranks
    assert last.transient - first.transient > 9 * logits - first.transient
