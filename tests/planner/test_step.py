"""A job's step, simulated: as long as it is planned, and what must hold of its events."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from fivefold.axes.messages import step_messages
from fivefold.config import Job, load, resolve
from fivefold.hardware.cluster import find_cluster
from fivefold.ledger.ledger import Message
from fivefold.ledger.setup import Setup
from fivefold.planner.play.simulated_step import simulated
from fivefold.planner.play.timed import Timed
from fivefold.planner.play.timeline import Event
from fivefold.planner.time.parts import Costs
from tests.planner.durations import seconds

CLUSTER = find_cluster("dgx-h100")


def job_of(devices: int, *words: str, batch: int = 64, preset: str = "llama3-8b") -> Job:
    settings = ["--training.seq_len=4096", f"--training.global_batch={batch}", "--training.micro_batch=1"]
    return resolve(load(None, preset, [*settings, *words]), devices, "cuda")


def streams(job: Job) -> tuple[list[Event], list[Event]]:
    """What a rank computes in a step without a pipeline, and its messages beside it."""
    rows = simulated(job, CLUSTER).rows
    return rows["compute"], rows.get("messages", [])


def test_a_step_without_a_pipeline_is_the_same_in_a_plan_and_in_a_simulation() -> None:
    job = job_of(64, "--layout.zero=3", batch=256)
    compute, _ = streams(job)
    assert compute[-1].kind == "optimizer"
    assert simulated(job, CLUSTER).took.step_time == pytest.approx(compute[-1].end)
    assert seconds(Setup.of(job), CLUSTER) == pytest.approx(compute[-1].end)


def test_partial_gradients_of_tp_ranks_are_summed_in_one_message() -> None:
    """Not the norms of each of 32 layers in one of their own."""
    setup = Setup.of(job_of(8, "--layout.tp=8", batch=1))
    costs = Costs.of(setup, CLUSTER)
    step = sum(float(costs.message(message)) for message in step_messages(setup))
    one = float(costs.message(Message("all_reduce", 8 * setup.spec.dim, "tp", 8, 1, "optimizer")))
    assert step < float(Timed.of(costs).late) < step + 5 * one


def test_alone_a_rank_only_computes() -> None:
    job = job_of(1, batch=2)
    (*compute, optimizer), messages = streams(job)
    assert messages == []
    assert simulated(job, CLUSTER).took.exposed["dp"] == pytest.approx(0, abs=1e-9)
    assert len(compute) == 2 * 2 * (job.spec.layers + 2)
    assert all(one.end == other.start for one, other in pairwise([*compute, optimizer]))


def test_a_part_waits_for_its_weights_and_the_end_for_the_last_gradients() -> None:
    job = job_of(512, "--layout.zero=3", batch=512)
    (*compute, late, optimizer), messages = streams(job)
    gathers = [event for event in messages if event.kind == "gather"]
    starts = {(e.kind, e.stage, e.micro_batch): e.start for e in compute}
    layers = job.spec.layers
    assert len(gathers) == 2 + 2 * layers  # the ends once, every block for forward and for backward
    for gather in gathers[: layers + 2]:
        assert gather.end <= starts["forward", gather.stage, 0] + 1e-12
    reductions = [event for event in messages if event.kind == "reduce"]
    assert len(reductions) == layers + 2
    ends = {(e.kind, e.stage, e.micro_batch): e.end for e in compute}
    assert all(event.start >= ends["backward", event.stage, 0] for event in reductions)
    assert (late.kind, optimizer.kind) == ("exposed", "optimizer")
    assert late.start == reductions[-1].end > compute[-1].end
    assert all(one.end <= other.start + 1e-12 for one, other in pairwise(messages))
    assert simulated(job, CLUSTER).took.exposed["dp"] > 0


def test_zero_1_reduces_once_a_step_and_zero_2_for_every_micro_batch() -> None:
    def reduced(zero: int) -> Counter[int]:
        """Micro-batch -> how many messages are sent behind it."""
        _, messages = streams(job_of(8, f"--layout.zero={zero}", batch=32))
        return Counter(event.micro_batch for event in messages if event.kind == "reduce")

    once = reduced(1)
    assert list(once) == [3]  # behind the last
    assert reduced(2) == dict.fromkeys(range(4), once[3])


def test_what_zero_2_sends_for_every_micro_batch_hides_behind_each_of_them() -> None:
    """Behind one backward pass alone most of it would be waited for."""
    job = job_of(1024, "--layout.zero=2", batch=4096)
    compute, messages = streams(job)
    sent = sum(event.end - event.start for event in messages if event.kind == "reduce")
    backward = sum(e.end - e.start for e in compute if e.kind == "backward" and e.micro_batch == 0)
    assert 0 < simulated(job, CLUSTER).took.exposed["dp"] < 0.5 * (sent - backward)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_a_pipelines_step(schedule: str) -> None:
    job = job_of(16, "--layout.pp=4", f"--layout.schedule={schedule}", batch=64)
    step = simulated(job, CLUSTER)
    assert list(step.rows) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert 0 < step.bubble < 0.5
    assert all(row[-1].kind == "optimizer" for row in step.rows.values())
    [end] = {row[-1].end for row in step.rows.values()}
    assert end == pytest.approx(step.took.step_time)
    assert end == pytest.approx(seconds(Setup.of(job), CLUSTER))
    assert step.took.exposed["pp"] >= 0
    held = [[level for _, level in curve] for curve in step.memory.values()]
    assert all(min(levels) > 0 for levels in held)
    # What a rank has at the end is what it had before the first forward.
    assert all(levels[-1] == pytest.approx(min(levels)) for levels in held)
    if schedule == "1f1b":
        assert step.in_flight == [4, 3, 2, 1]
        assert max(held[1]) > max(held[2])  # one micro-batch more, as many layers


def test_memory_rises_through_forward_and_falls_through_backward() -> None:
    job = job_of(8, "--layout.zero=3", batch=8)
    (curve,) = simulated(job, CLUSTER).memory.values()
    levels = [level for _, level in curve]
    top = levels.index(max(levels))
    assert levels[: top + 1] == sorted(levels[: top + 1])
    assert levels[top:] == sorted(levels[top:], reverse=True)
    (lean,) = simulated(job_of(8, "--training.recompute=full", batch=8), CLUSTER).memory.values()
    kept, kept_lean = (max(levels) - min(levels) for levels in (levels, [level for _, level in lean]))
    assert kept_lean < 0.2 * kept


@pytest.mark.parametrize("words", [["--training.recompute=full"], ["--training.compile=true"]])
def test_a_backward_in_one_piece_fills_no_bubble(words: list[str]) -> None:
    """With recomputation or compilation the program does not cut backward in two, whatever the schedule."""
    layout = ["--layout.pp=8", "--layout.schedule=zero-bubble", "--layout.virtual_stages=2", "--layout.tp=8"]
    cut, whole = (job_of(128, *layout, *more, batch=64, preset="llama3-70b") for more in ([], words))
    assert float(Costs.of(Setup.of(whole), CLUSTER).block.backward_weight) == 0
    assert simulated(whole, CLUSTER).bubble > 1.2 * simulated(cut, CLUSTER).bubble
