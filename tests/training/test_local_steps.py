"""Replicas that train alone between outer steps compute what a plain program of DiLoCo computes."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch

from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.training.local_steps import Rounds
from tests.cases import Case, built_on_cpu
from tests.ranks import on_ranks
from tests.training.replica_cases import CASES, LATE, PLAIN, SGD, case, of
from tests.training.replicas import Mine, Reference, assert_close, corpus_for, mine, trained, whole


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


# --- when, and what is told ---------------------------------------------------------------------------------


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
