"""Replicas that train alone between outer steps compute what a plain program of DiLoCo computes."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from fivefold.axes.checks import check
from fivefold.axes.messages import Traffic
from fivefold.axes.outer import fragment_of
from fivefold.comm.world import World
from fivefold.config import Job, load, resolve
from fivefold.ledger.ledger import repeated
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameter_count, parameters
from fivefold.problems import BadInput, Problem
from fivefold.replay.account import account
from fivefold.storage.manifest import read_manifest
from fivefold.training.checkpoint import load_latest
from fivefold.training.failures import RankFailure, RanksFailed
from fivefold.training.flight import LostReplicaError
from fivefold.training.local_steps import Rounds
from fivefold.training.ranks import run_ranks
from fivefold.training.replica_state import replicas_in
from fivefold.training.reshard import arranged
from fivefold.training.stopping import SAVE, STOP
from tests.cases import SPEC, TIED, Case, batches, built_on_cpu
from tests.ranks import on_ranks
from tests.tracer import MessageTracer
from tests.training.replicas import (
    Mine,
    Reference,
    assert_close,
    corpus_for,
    mine,
    resumed,
    saved_half_way,
    trained,
    whole,
)

STEPS = 8
MOE = SPEC | {"layers": 2, "experts": 4, "experts_per_token": 2}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.0}


def case(name: str, ranks: int, layout: dict[str, Any], outer: dict[str, Any], **more: Any) -> Case:
    training = {"steps": STEPS, **more.pop("training", {})}
    return Case(name, ranks, {"dp_replicate": 2, **layout}, training, communication=outer, **more)


PLAIN = {"local_steps": 4}
LATE = {"local_steps": 4, "outer_delay": 3}
TURNS = {"local_steps": 4, "fragments": 2, "outer_delay": 3}
CASES = {
    one.name: one
    for one in (
        case("plain", 2, {"zero": 0}, PLAIN),
        case("plain sgd tied", 2, {"zero": 0}, {**PLAIN, "outer_momentum": 0.0}, optimizer=SGD, spec=TIED),
        case("bf16", 2, {"zero": 0}, PLAIN, training={"precision": "bf16"}, optimizer={"ema": 0.9}),
        case("late", 2, {"zero": 0}, LATE),
        case("late by a round", 2, {"zero": 0}, {"local_steps": 2, "outer_delay": 2}),
        case("turns", 2, {"zero": 0}, TURNS),
        case("mixed turns", 2, {"zero": 0}, {**TURNS, "outer_mix": 0.5}),
        case("every step late", 2, {"zero": 0}, {"outer_delay": 3, "outer_lr": 1.0, "outer_momentum": 0.0}),
        case("zero 3", 4, {"dp_shard": 2, "zero": 3}, TURNS),
        case("tp", 4, {"tp": 2, "zero": 0}, LATE),
        case("zero 1 cp", 4, {"cp": 2, "zero": 1}, PLAIN),
        case("cp", 4, {"cp": 2, "zero": 0}, TURNS),
        case("pp tied", 4, {"pp": 2, "zero": 0}, TURNS, spec=TIED, training={"micro_batch": 2}),
        case(
            "zbv tied",
            4,
            {"pp": 2, "zero": 0, "schedule": "zbv"},
            LATE,
            spec=TIED,
            training={"micro_batch": 1},
        ),
        case("ep", 4, {"dp_shard": 2, "ep": 2}, PLAIN, spec=MOE, training={"balance": "bias"}),
        case(
            "three replicas pp tied",
            6,
            {"dp_replicate": 3, "pp": 2, "zero": 0},
            LATE,
            spec=TIED,
            training={"micro_batch": 2, "global_batch": 12},
        ),
    )
}


def jobs_on(ranks: int) -> dict[str, Job]:
    return {name: one.job() for name, one in CASES.items() if one.ranks == ranks}


def marked(names: Any) -> list[Any]:
    return [pytest.param(n, marks=[pytest.mark.slow] if CASES[n].ranks > 2 else []) for n in names]


@cache
def live(ranks: int) -> list[dict[str, Mine]]:
    return on_ranks(trained, ranks, jobs_on(ranks))


@cache
def live_half_way(ranks: int) -> list[dict[str, Mine]]:
    """In the middle of a round, with averages on their way."""
    return on_ranks(trained, ranks, jobs_on(ranks), 5)


def of(ranks: list[dict[str, Mine]], name: str) -> list[Mine]:
    return [rank[name] for rank in ranks]


@pytest.mark.parametrize("name", marked(name for name in CASES if name != "bf16"))
def test_replicas_compute_what_a_plain_program_does(name: str) -> None:
    job = CASES[name].job()
    expected, half_way = Reference.of(job), Reference.of(job)
    expected.train()
    half_way.train(5)
    ranks = CASES[name].ranks
    for ours, theirs in ((live(ranks), expected), (live_half_way(ranks), half_way)):
        found = of(ours, name)
        assert_close(whole(found, "weights"), theirs.weights, 1e-11)
        assert_close(whole(found, "anchors"), [theirs.anchors] * len(theirs.replicas), 1e-11)
        if job.communication.outer_momentum:
            assert_close(whole(found, "momenta"), [theirs.momenta] * len(theirs.replicas), 1e-11)


@pytest.mark.parametrize("name", marked(CASES))
def test_a_run_ends_with_the_outer_weights_on_every_replica(name: str) -> None:
    found = of(live(CASES[name].ranks), name)
    weights, anchors = whole(found, "weights"), whole(found, "anchors")
    for replica in weights:
        for parameter, value in replica.items():
            assert torch.equal(value, weights[0][parameter]), parameter
            assert torch.equal(value, anchors[0][parameter]), parameter
    apart = whole(of(live_half_way(CASES[name].ranks), name), "weights")
    assert any(not torch.equal(value, apart[1][parameter]) for parameter, value in apart[0].items())


def test_one_local_step_with_a_plain_outer_step_is_data_parallelism() -> None:
    """With equal token counts, no clipping, and SGD inside."""
    outer = {"outer_lr": 1.0, "outer_momentum": 0.0}
    training = {"steps": 4, "clip": 0.0}
    jobs = {
        kind: Case("", 2, {"zero": 0}, training, SGD, communication=settings).job()
        for kind, settings in (("outer", outer), ("ordinary", {}))
    }
    for rank in on_ranks(trained_on_equal_counts, 2, jobs):
        ours, ordinary = rank["outer"].values["weights"], rank["ordinary"].values["weights"]
        for name in ordinary:
            error = (ours[name] - ordinary[name]).norm() / ordinary[name].norm()
            assert error < 1e-12, name
        counts = [[result.tokens for result in rank[kind].results] for kind in jobs]
        assert [2 * count for count in counts[0]] == counts[1]


def trained_on_equal_counts(world: World, jobs: dict[str, Job]) -> dict[str, Mine]:
    found = {}
    for name, job in jobs.items():
        built, corpus = built_on_cpu(job), corpus_for(job, document_length=None)
        with corpus.train_loader(job.training.global_batch, 4, rank=world.rank, ranks=2) as loader:
            results = [built.step(next(loader), 0.1, step) for step in range(1, job.training.steps + 1)]
        found[name] = mine(built, results)
    return found


def test_without_delay_and_fragments_it_is_plain_diloco_bit_for_bit() -> None:
    """Against replicas in one process, a copy of the outer weights, and torch's own Nesterov SGD."""
    explicit = {"local_steps": 4, "outer_lr": 0.7, "fragments": 1, "outer_delay": 0, "outer_mix": 0.0}
    jobs = {name: case("", 2, {"zero": 0}, outer).job() for name, outer in (("a", PLAIN), ("b", explicit))}
    found = on_ranks(trained, 2, jobs)
    reference = Reference.of(jobs["a"])
    anchors = [anchor.clone().requires_grad_() for anchor in reference.anchors.values()]
    nesterov = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)

    def outer(step: int) -> None:
        if step % 4:
            return
        everyone = [replica.weights.masters for replica in reference.replicas]
        with torch.no_grad():
            for anchor, *masters in zip(anchors, *everyone, strict=True):
                anchor.grad = sum(anchor - master for master in masters) / 2
            nesterov.step()
            for masters in everyone:
                for anchor, master in zip(anchors, masters, strict=True):
                    master.copy_(anchor)

    reference.outer = outer  # type: ignore[method-assign]
    reference.train()
    for name in jobs:
        for rank in found:
            for parameter, value in reference.weights[0].items():
                assert torch.equal(rank[name].values["weights"][parameter], value), parameter


# --- compressed --------------------------------------------------------------------------------------------


def test_differences_may_travel_in_8_bits() -> None:
    jobs = {
        name: case("", 2, {"zero": 0}, {**outer, "compress": kind}, training={"precision": "fp32"}).job()
        for name, outer, kind in (
            ("plain", PLAIN, "none"),
            ("plain int8", PLAIN, "int8"),
            ("late", LATE, "none"),
            ("late int8", LATE, "int8"),
        )
    }
    ranks = on_ranks(trained, 2, jobs)
    for name in ("plain", "late"):
        exact, rounded = (whole(of(ranks, which), "weights") for which in (name, f"{name} int8"))
        for parameter, value in exact[0].items():
            assert torch.equal(rounded[0][parameter], rounded[1][parameter]), parameter
            error = (rounded[0][parameter] - value).norm() / value.norm()
            assert 0 < error < 0.02, (parameter, error)


def test_what_rounding_leaves_out_is_made_up_for() -> None:
    """Error feedback: it stays in the replica's weights, and the next difference has it."""
    outer = {"outer_lr": 1.0, "outer_momentum": 0.0}
    jobs = {
        name: case(
            "", 2, {"zero": 0}, outer | more, training={"steps": 40, "precision": "fp32"}, optimizer=SGD
        ).job()
        for name, more in (
            ("exact", {}),
            ("fed back", {"compress": "int8"}),
            ("lost", {"compress": "int8", "error_feedback": False}),
        )
    }
    ranks = on_ranks(trained, 2, jobs)
    exact, fed_back, lost = (whole(of(ranks, name), "weights")[0] for name in jobs)

    def off(found: dict[str, torch.Tensor]) -> float:
        return math.sqrt(sum(float((found[name] - exact[name]).square().sum()) for name in exact))

    assert 0 < off(fed_back) < off(lost) / 2


# --- saved and resumed -------------------------------------------------------------------------------------

SAVED = 5  # in the middle of a round, with averages on their way
OVERFLOWING: dict[str, Any] = {"precision": "fp16", "loss_scale": 2.0**21}
CASES_SAVED = CASES | {
    "fp16": case("fp16", 2, {"zero": 0}, TURNS, training=OVERFLOWING, optimizer={"lr": 1e-3}),
    "int8": case("int8", 2, {"zero": 0}, {**TURNS, "compress": "int8"}, training={"precision": "fp32"}),
    "bf16 every step": case("bf16 every step", 2, {"zero": 0}, {"outer_delay": 3, "compress": "bf16"}),
}


@cache
def saved(ranks: int) -> tuple[Path, list[dict[str, Mine]]]:
    folder = Path(mkdtemp(prefix="fivefold-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    jobs = {name: one.job() for name, one in CASES_SAVED.items() if one.ranks == ranks}
    return folder, on_ranks(saved_half_way, ranks, jobs, SAVED, folder)


@cache
def taken_up(ranks: int) -> list[dict[str, Mine]]:
    jobs = {name: one.job() for name, one in CASES_SAVED.items() if one.ranks == ranks}
    return on_ranks(resumed, ranks, jobs, saved(ranks)[0])


def assert_same(ours: Mine, theirs: Mine) -> None:
    assert ours.values.keys() == theirs.values.keys()
    for kind, tensors in theirs.values.items():
        assert ours.values[kind].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(ours.values[kind][name], tensor), (kind, name)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if c.ranks > 2 else []) for n, c in CASES_SAVED.items()]
)
def test_a_resumed_run_is_bit_identical(name: str) -> None:
    """Weights, moments, outer state, and what is on its way: as if it had never stopped."""
    ranks = CASES_SAVED[name].ranks
    folder, straight = saved(ranks)
    for before, after in zip(of(straight, name), of(taken_up(ranks), name), strict=True):
        assert_same(after, before)
        assert [(r.loss, r.grad_norm) for r in after.results] == [
            (r.loss, r.grad_norm) for r in before.results[SAVED:]
        ]
    tensors = read_manifest(folder / name / "checkpoints" / f"step-{SAVED}").tensors
    delay = CASES_SAVED[name].job().communication.outer_delay
    assert any(".arriving." in tensor for tensor in tensors) == bool(delay)
    replicas = CASES_SAVED[name].job().layout.dp_replicate
    assert replicas_in(tensors) == replicas


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("turns", {"dp_shard": 2, "zero": 3}),
        ("late", {"tp": 2, "zero": 0}),
        ("every step late", {"pp": 2, "zero": 0}),
        ("tp", {"cp": 2, "zero": 2}),
        ("zero 3", {"zero": 0}),
    ],
)
def test_the_layout_inside_replicas_may_change(before: str, after: dict[str, Any]) -> None:
    one = CASES[before]
    ranks = 2 if after == {"zero": 0} else 4
    moved = replace(one, ranks=ranks, layout={"dp_replicate": 2, **after})
    folder, straight = saved(one.ranks)
    found = on_ranks(resumed, ranks, {f"{before} -> moved": moved.job()}, folder)
    for kind in ("weights", "anchors"):
        expected = whole(of(straight, before), kind)
        assert_close(whole(of(found, f"{before} -> moved"), kind), expected, 1e-11)


def test_a_resharded_checkpoint_has_everything(tmp_path: Path) -> None:
    """For another layout without ranks: every tensor is there, in the pieces of its own replica's ranks."""
    folder, _ = saved(2)
    source = folder / "late" / "checkpoints" / f"step-{SAVED}"
    manifest = read_manifest(source)
    layout = {"dp_replicate": 2, "dp_shard": 2, "zero": 3}
    job = replace(CASES["late"], ranks=4, layout=layout).job()
    cuts = arranged(job, manifest.tensors)
    assert cuts.keys() == manifest.tensors.keys()
    files = {cut.file for name in cuts if name.startswith("replica.1.") for cut in cuts[name]}
    assert files == {"rank-00002.safetensors", "rank-00003.safetensors"}
    files = {cut.file for name in cuts if name.startswith("model.") for cut in cuts[name]}
    assert files == {"rank-00000.safetensors", "rank-00001.safetensors"}


def test_other_settings_of_outer_steps_may_take_over() -> None:
    """Averages on their way are applied when the new delay has passed."""
    folder, _ = saved(2)
    settings = {"local_steps": 2, "fragments": 1, "outer_delay": 1, "outer_momentum": 0.0}
    job = replace(CASES["turns"], communication=settings).job()
    found = on_ranks(resumed, 2, {"turns -> others": job}, folder)
    weights, anchors = (whole(of(found, "turns -> others"), kind) for kind in ("weights", "anchors"))
    for parameter, value in weights[0].items():
        assert torch.equal(value, weights[1][parameter])
        assert torch.equal(value, anchors[0][parameter])


def loaded(world: World, job: Job, folder: Path) -> Mine:
    built = built_on_cpu(job)
    load_latest(built, folder)
    return mine(built, [])


def test_an_ordinary_run_goes_on_from_the_outer_weights() -> None:
    folder, _ = saved(2)
    job = replace(CASES["late"], communication={}).job()
    same = on_ranks(loaded, 2, CASES["late"].job(), folder / "late")
    for rank, before in zip(on_ranks(loaded, 2, job, folder / "late"), same, strict=True):
        for name, weights in rank.values["weights"].items():
            assert torch.equal(weights, before.values["anchors"][name])
            assert torch.equal(rank.values["optimizer 0"][name], same[0].values["optimizer 0"][name])


def test_outer_steps_take_up_an_ordinary_run(tmp_path: Path) -> None:
    ordinary = replace(CASES["late"], communication={}).job()
    straight = on_ranks(saved_half_way, 2, {"ordinary": ordinary}, SAVED, tmp_path)
    found = on_ranks(loaded, 2, CASES["late"].job(), tmp_path / "ordinary")
    for rank in found:
        for name, weights in rank.values["weights"].items():
            assert torch.equal(weights, rank.values["anchors"][name])
            assert torch.equal(weights, found[0].values["weights"][name])
            assert not rank.values["momenta"][name].any()
    assert straight


@pytest.mark.slow
def test_more_replicas_start_as_those_that_were_saved() -> None:
    folder, _ = saved(2)
    more = replace(CASES["late"], ranks=4, layout={"dp_replicate": 4, "zero": 0}).job()
    before = on_ranks(loaded, 2, CASES["late"].job(), folder / "late")
    for rank, found in enumerate(on_ranks(loaded, 4, more, folder / "late")):
        assert_same(found, replace(before[rank % 2]))


# --- the ledger, the fragments, when -----------------------------------------------------------------------


def traced(world: World, job: Job, rounds: int) -> dict[str, Any]:
    """What a rank sent in some rounds, after the first, and keeps for outer steps."""
    built, tracer = built_on_cpu(job), None
    each = job.communication.local_steps
    tracer = MessageTracer(built.mesh)
    with batches(job, built) as loader:
        for step in range(1, each + 1):
            built.step(next(loader), 1e-3, step)
        with tracer:
            for step in range(each + 1, (rounds + 1) * each + 1):
                built.step(next(loader), 1e-3, step)
    assert built.outer is not None
    kept = [*built.outer.anchors, *(built.outer.momenta or [])]
    return {
        "traffic": tracer.traffic(),
        "kept": sum(tensor.nbytes for tensor in kept),
        "place": built.mesh.place,
    }


ACCOUNTED = {
    "plain": case("", 2, {"zero": 0}, PLAIN),
    "bf16": case(
        "",
        2,
        {"zero": 0, "bucket_mb": 0.02},
        {**TURNS, "outer_momentum": 0.0},
        training={"precision": "bf16"},
    ),
    "int8": case("", 2, {"zero": 0}, {**PLAIN, "compress": "int8"}, training={"precision": "fp32"}),
    "zero 3": case("", 4, {"dp_shard": 2, "zero": 3, "bucket_mb": 0.02}, TURNS),
    "zero 1 tp": case("", 8, {"dp_shard": 2, "tp": 2, "zero": 1}, PLAIN),
    "cp": case("", 4, {"cp": 2, "zero": 0}, LATE),
    "pp tied": case("", 4, {"pp": 2, "zero": 0}, TURNS, spec=TIED, training={"micro_batch": 2}),
    "experts": case("", 8, {"dp_shard": 4, "ep": 2}, PLAIN, spec=MOE, training={"routing": "balanced"}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if c.ranks > 2 else []) for n, c in ACCOUNTED.items()]
)
def test_the_ledger_knows_every_message_and_what_is_kept(name: str) -> None:
    job = ACCOUNTED[name].job()
    job = job.model_copy(update={"training": job.training.model_copy(update={"steps": 16})})
    rounds = 2
    for found in on_ranks(traced, ACCOUNTED[name].ranks, job, rounds):
        ledger = account(job, found["place"])
        assert found["traffic"] == ledger.traffic(rounds * job.communication.local_steps)
        kept = [line for line in ledger.held if line.what == "outer weights and momentum"]
        assert [line.rest for line in kept] == [found["kept"]]


def test_nothing_of_an_inner_step_leaves_the_replica() -> None:
    job = ACCOUNTED["zero 3"].job()
    crossing = [line for line in account(job).messages if "dp_replicate" in line.group]
    assert crossing
    assert all(line.count <= 2 / 4 for line in crossing)


@pytest.mark.parametrize("fragments", [2, 4])
def test_fragments_are_about_as_large_as_each_other(fragments: int) -> None:
    spec = CASES["plain"].job().spec
    where = fragment_of(spec, fragments)
    sizes = [sum(p.count for p in parameters(spec) if where[p.name] == f) for f in range(fragments)]
    assert sum(sizes) == parameter_count(spec)
    assert max(sizes) < 1.1 * parameter_count(spec) / fragments


def test_when_averages_are_started_and_applied() -> None:
    rounds = Rounds(local_steps=8, fragments=4, delay=3, last=32)
    assert {step: rounds.started(step) for step in range(1, 17) if rounds.started(step)} == {
        2: [1],
        4: [2],
        6: [3],
        8: [0],
        10: [1],
        12: [2],
        14: [3],
        16: [0],
    }
    assert rounds.started(32) == [0, 1, 2, 3]
    assert [rounds.due(8), rounds.due(30), rounds.due(32)] == [11, 32, 32]
    each = Rounds(local_steps=1, fragments=1, delay=5, last=9)
    assert [each.started(step) for step in (1, 2)] == [[0], [0]]


def test_replicas_tell_each_other_with_every_average() -> None:
    found = of(live(2), "turns")
    for rank in found:
        told = [(step, result.outer) for step, result in enumerate(rank.results, 1) if result.outer]
        assert [step for step, _ in told] == [5, 7, 8]  # started after 2 and 4; 6 and all others at the end
        assert all(outer.outer_wait_s >= 0 and outer.replica_lag_s >= 0 for _, outer in told)
    both = [sum(result.loss for result in rank.results[:2]) / 2 for rank in found]
    first = found[0].results[4].outer
    assert first is not None
    assert first.replicas_loss == pytest.approx(sum(both) / 2, rel=1e-12)


# --- what goes wrong ---------------------------------------------------------------------------------------


def ended(world: World, job: Job, asks: dict[int, int], slow: int) -> int:
    """After which step a rank ends that is asked to after another, of which one takes its time."""
    built = built_on_cpu(job)
    with batches(job, built) as loader:
        for step in range(1, job.training.steps + 1):
            time.sleep(0.2 if world.rank == slow else 0.0)
            built.step.asks = STOP * (asks.get(world.rank, 99) <= step)
            if built.step(next(loader), 1e-3, step).asked >= STOP:
                return step
    return job.training.steps + 1


@pytest.mark.parametrize(
    ("outer", "asks", "slow", "latest"),
    [
        (PLAIN, {0: 2, 1: 2}, 0, 2),
        (PLAIN, {0: 2, 1: 3}, 0, 3),
        (PLAIN, {0: 2}, 0, 5),  # the other waits for it after step 4
        ({"local_steps": 8}, {1: 1}, 1, 9),  # if it waits after the last step there is nothing left to end
        ({"outer_delay": 3}, {0: 2}, 0, 6),
        ({"outer_delay": 3, "compress": "int8"}, {0: 2}, 0, 5),  # it waits half-way, too
    ],
)
def test_all_replicas_end_after_the_same_step(
    outer: dict[str, Any], asks: dict[int, int], slow: int, latest: int
) -> None:
    """And without a wait for the end of a round: how early depends on how far ahead the other is."""
    first, second = on_ranks(ended, 2, case("", 2, {"zero": 0}, outer).job(), asks, slow)
    assert first == second
    assert min(asks.values()) <= first <= latest


def saves(world: World, job: Job) -> list[int]:
    """After which steps all ranks save, of which the first asks from step 2 on until it is done."""
    built, found = built_on_cpu(job), list[int]()
    with batches(job, built) as loader:
        for step in range(1, job.training.steps + 1):
            built.step.asks = SAVE * (world.rank == 0 and step >= 2 and not found)
            if built.step(next(loader), 1e-3, step).asked:
                found.append(step)
    return found


@pytest.mark.parametrize(("outer", "after"), [(PLAIN, 4), ({"outer_delay": 3}, 5)])
def test_all_replicas_save_once_after_the_same_step(outer: dict[str, Any], after: int) -> None:
    """Although it was asked for with every average that was started before."""
    assert on_ranks(saves, 2, case("", 2, {"zero": 0}, outer).job()) == [[after], [after]]


def spoiled(world: World, job: Job) -> list[tuple[float, str | None]]:
    """A weight of the last rank is lost in step 3; the first weight of each rank and the problem by step."""
    built, found = built_on_cpu(job), []
    with batches(job, built) as loader:
        for step in range(1, job.training.steps + 1):
            result = built.step(next(loader), 1e-3, step)
            if step == 3 and world.rank == world.size - 1:
                with torch.no_grad():
                    built.weights.masters[-1].view(-1)[0] = torch.inf
            found.append((built.weights.masters[-1].view(-1)[0].item(), result.problem))
    return found


def test_a_difference_that_is_not_finite_is_named_and_dropped_or_the_end() -> None:
    job = case("", 2, {"zero": 0}, {"local_steps": 4, "outer_lr": 1.0}, training={"clip": 0.0}).job()
    skipping = job.model_copy(update={"resilience": job.resilience.model_copy(update={"non_finite": "skip"})})
    name = "head.output.weight"
    for rank in on_ranks(spoiled, 2, skipping):
        steps = [problem for _, problem in rank]
        assert steps[3] is not None
        assert f"step 4: the weight {name} on rank 1 (replica 1) is not finite." in steps[3]
        assert math.isfinite(rank[-1][0])
    with pytest.raises(RanksFailed, match=r"not finite"):
        on_ranks(spoiled, 2, job)


def cut_off(world: World, job: Job) -> str:
    """What a rank says when the link between the replicas drops in the middle of a round."""
    built = built_on_cpu(job)
    with batches(job, built) as loader:
        for step in range(1, job.training.steps + 1):
            if step == 2 and world.rank == 1:
                drop_links()
            try:
                built.step(next(loader), 1e-3, step)
            except LostReplicaError as error:
                failure = RankFailure.of(world.rank, error)
                return f"{failure.is_death}: {failure.message}"
    return ""


def drop_links() -> None:
    """End every TCP connection of this process."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()  # one that only listens has none
                        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="connections are found in /proc")
def test_a_link_that_drops_names_the_replica_and_may_be_restarted() -> None:
    """`is_death`: the job's `resilience.restarts` apply to it."""
    said = run_ranks(cut_off, 2, case("", 2, {"zero": 0}, PLAIN).job())
    assert said[0].startswith("True: replica 1 (rank 1) did not send its part of the average of step 4:")
    assert said[1].startswith("True: replica 0 (rank 0) did not send its part of the average of step 4:")


def test_refusals() -> None:
    def refused(words: str, ranks: int = 2) -> list[str]:
        try:
            job = resolve(load(None, "tiny", words.split()), ranks)
        except BadInput as error:
            return [told(problem) for problem in error.problems]
        return [told(problem) for problem in check(job)]

    def told(problem: Problem) -> str:
        return f"{problem.key}: {problem.message}. {problem.hint}"

    two = "--layout.zero=0 --layout.dp_replicate=2 --training.steps=12 --communication."
    assert refused(f"{two}local_steps=4") == []
    assert refused(f"{two}local_steps=5") == [
        "communication.local_steps: 5 does not divide training.steps = 12: the last round would be shorter. "
        "Use communication.local_steps = 4 or 6, or training.steps = 10 or 15."
    ]
    assert refused(f"{two}local_steps=4 --communication.fragments=3") == [
        "communication.fragments: 3 does not divide communication.local_steps = 4: turns would be uneven. "
        "Use communication.fragments = 2 or 4, or communication.local_steps = 3 or 6."
    ]
    assert refused(f"{two}local_steps=4 --communication.outer_delay=5") == [
        "communication.outer_delay: 5 is longer than a round of communication.local_steps = 4. "
        "Use at most 4, or communication.local_steps = 5; at 1 any delay is allowed."
    ]
    assert refused(f"{two}outer_delay=5") == []
    assert refused(f"{two}outer_delay=5 --communication.outer_mix=0.5")[0].startswith(
        "communication.outer_mix: 0.5 where averages overtake each other"
    )
    assert refused(f"{two}fragments=2")[0].startswith("communication.fragments: 2 without outer steps")
    assert "rollback" in refused(f"{two}local_steps=4 --resilience.non_finite=rollback")[0]
    alone = refused("--layout.zero=3 --layout.dp_shard=2 --communication.local_steps=4")
    assert "layout.dp_replicate = 1, so there is nothing to average" in alone[0]
    assert refused("--layout.zero=3 --layout.dp_shard=2 --communication.outer_lr=1.0")


@pytest.mark.parametrize("name", ACCOUNTED)
def test_messages_of_parts_are_those_of_a_rank(name: str) -> None:
    """As a search sees them: as many bytes between replicas, but for the padding of 8-bit blocks."""
    job = ACCOUNTED[name].job()
    parts = Traffic(Setup.of(job))
    counts = {"embedding": 1, "block": job.spec.layers // job.layout.pp, "head": int(job.layout.pp == 1)}
    of_parts = [*parts.step, *(m for part, ms in parts.state.items() for m in repeated(ms, counts[part]))]
    found, expected = (
        sum(float(m.payload * m.count) for m in messages if m.group == "dp_replicate")
        for messages in (of_parts, account(job).messages)
    )
    assert found == pytest.approx(expected, rel=0.2 if "compress" in ACCOUNTED[name].communication else 1e-12)
