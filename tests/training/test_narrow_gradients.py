"""Gradients in 16 bits: where they stay so, and that nothing is lost by it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fivefold.axes.layout import Place
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import EMBEDDING
from fivefold.planner.memory.our_tensors import rank_tensors
from fivefold.replay.account import account
from fivefold.training.build import Built
from fivefold.training.preflight import held
from tests.axes.test_account import storage_bytes
from tests.cases import SPEC, TIED, Case, batches, built_on_cpu
from tests.ranks import on_ranks

ONE = {"precision": "bf16", "micro_batch": 8}
"""One micro-batch a step, where one rank has all of the batch."""
MOE = SPEC | {"layers": 2, "experts": 4, "experts_per_token": 2}
OUTER = {"local_steps": 2, "outer_lr": 0.7}
TIED_NAMES = {EMBEDDING}


def is_norm(name: str) -> bool:
    return "norm" in name


def is_expert(name: str) -> bool:
    return ".experts." in name


def every(name: str) -> bool:
    return True


def none(name: str) -> bool:
    return False


CASES: dict[str, tuple[Case, Any]] = {
    case.name: (case, narrow)
    for case, narrow in (
        (Case("one micro-batch", 1, {}, ONE), every),
        (Case("tied", 1, {}, ONE, spec=TIED), every),
        (Case("a loss in chunks", 1, {}, ONE | {"loss_chunk": 24}), every),
        (Case("moments in 16 bits", 1, {}, ONE, {"states": "bf16"}), every),
        (Case("an average", 1, {}, ONE, {"ema": 0.99}), every),
        (Case("two micro-batches", 1, {}, ONE | {"micro_batch": 4}), none),
        (Case("fp16, divided by the loss scale", 1, {}, ONE | {"precision": "fp16"}), none),
        (Case("fp32", 1, {}, ONE | {"precision": "fp32"}), none),
        (Case("sgd", 1, {}, ONE, {"name": "sgd"}), none),
        (Case("muon", 1, {}, ONE, {"name": "muon"}), none),
        (Case("zero 0", 2, {"zero": 0}, ONE | {"micro_batch": 4}), none),
        (Case("zero 1", 2, {"zero": 1}, ONE | {"micro_batch": 4}), none),
        (Case("cp", 2, {"cp": 2, "zero": 0}, ONE), none),
        (Case("tp", 2, {"tp": 2}, ONE), lambda name: not is_norm(name)),
        (Case("pp", 2, {"pp": 2, "schedule": "gpipe"}, ONE), every),
        (Case("pp, tied", 2, {"pp": 2, "schedule": "gpipe"}, ONE, spec=TIED), lambda n: n not in TIED_NAMES),
        (
            Case("experts", 2, {"zero": 0, "cp": 2, "ep": 2}, ONE, spec=MOE),
            is_expert,
        ),
        (
            Case(
                "experts with copies",
                4,
                {"zero": 0, "dp_replicate": 2, "cp": 2, "ep": 2},
                ONE | {"micro_batch": 4},
                spec=MOE,
            ),
            none,
        ),
        (
            Case("replicas that train alone", 2, {"zero": 0}, ONE | {"micro_batch": 4}, communication=OUTER),
            every,
        ),
    )
}


def after_backward(job: Job) -> dict[str, Any]:
    """Of a rank: the dtype of each gradient, and what all take."""
    built = built_on_cpu(job)
    with batches(job, built) as loader:
        given = next(loader)
    built.step.backward(given, built.step.count_tokens(given))
    found = built.step.collect()
    dtypes = {name: str(gradient.dtype) for name, gradient in zip(built.weights.names, found, strict=True)}
    return {"dtypes": dtypes, "bytes": storage_bytes(found), "place": built.mesh.place}


def on_each(world: World, ranks: int) -> dict[str, Any]:
    return {name: after_backward(case.job()) for name, (case, _) in CASES.items() if case.ranks == ranks}


@cache
def by_rank(ranks: int) -> list[dict[str, Any]]:
    return on_ranks(on_each, ranks, ranks)


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_has_16_bits_where_nothing_is_added_to_it(name: str) -> None:
    case, narrow = CASES[name]
    for found in (ranks[name] for ranks in by_rank(case.ranks)):
        for parameter, dtype in found["dtypes"].items():
            assert dtype == ("torch.bfloat16" if narrow(parameter) else "torch.float32"), parameter


@pytest.mark.parametrize("name", [name for name in CASES if "zero 1" not in name])
def test_ledger_planner_and_preflight_know_their_bytes(name: str) -> None:
    case, _ = CASES[name]
    job = case.job()
    for found in (ranks[name] for ranks in by_rank(case.ranks)):
        place: Place = found["place"]
        ledger = account(job, place)
        assert ledger.rest("gradients") == found["bytes"]
        if place.tp:
            continue  # planner and preflight look at the first rank along tp, which has the most
        tensors = rank_tensors(Setup.of(job), place.pp)
        assert tensors.gradients == found["bytes"]
        if not case.communication and job.optimizer.name != "muon":
            every = ledger.rest("weights") + ledger.rest("states") + found["bytes"]
            assert held(job, Setup.of(job), place.pp) == every


# --- nothing is lost ---------------------------------------------------------------------------------------


def trained(job: Job, narrow: bool, steps: int = 4) -> dict[str, Any]:
    built = built_on_cpu(job)
    assert built.weights.narrow
    if not narrow:
        built.weights.narrow = frozenset()
    told = []
    with batches(job, built) as loader:
        for step in range(1, steps + 1):
            result = built.step(next(loader), 1e-2, step)
            told.append((result.loss, result.grad_norm))
    return {"told": told, "kept": kept(built)}


def kept(built: Built) -> list[Any]:
    weights = [parameter.detach() for parameter in built.model.parameters()]
    every = [*built.weights.masters, *weights, *built.optimizer.tensors()]
    plain = [each.to_local() if hasattr(each, "to_local") else each for each in every]
    return [each.detach().double().numpy() for each in plain]


def both_ways(world: World | None, name: str) -> bool:
    case, _ = CASES[name]
    clipped = Case(**vars(case) | {"training": case.training | {"clip": 0.1}})
    one, other = (trained(clipped.job(), narrow) for narrow in (True, False))
    assert min(norm for _, norm in one["told"]) > 0.1, "nothing was clipped"
    assert one["told"] == other["told"]
    return all((a == b).all() for a, b in zip(one["kept"], other["kept"], strict=True))


@pytest.mark.parametrize("name", ["one micro-batch", "tied", "moments in 16 bits", "an average"])
def test_losses_norms_and_weights_are_those_of_wide_gradients(name: str) -> None:
    assert both_ways(None, name)


def test_so_they_are_where_some_are_narrow() -> None:
    assert on_ranks(both_ways, 2, "tp") == [True, True]


def test_more_micro_batches_than_the_job_has_add_up_in_float32() -> None:
    built = built_on_cpu(Case("one", training=ONE).job())
    with batches(built.job, built) as loader:
        given = [next(loader)[0] for _ in range(2)]
    expected: list[torch.Tensor] = []
    for batch in given:
        built.step.backward([batch], 100)
        found = [gradient.float() for gradient in built.step.collect()]
        expected = [a + b for a, b in zip(expected, found, strict=True)] if expected else found
        built.weights.clear_gradients()
    built.step.backward(given, 100)
    for gradient, total in zip(built.step.collect(), expected, strict=True):
        assert torch.equal(gradient, total)


def test_what_is_not_finite_is_named() -> None:
    built = built_on_cpu(Case("one", training=ONE).job())
    with batches(built.job, built) as loader:
        given = next(loader)
    loss = built.step.backward(given, 100)
    gradients = built.step.collect()
    gradients[3][0] = torch.inf
    total, norm = built.step.totals(loss, gradients)
    assert norm.isinf()
    assert norm.dtype == torch.float32
    assert built.weights.names[3] in built.step.find_non_finite(1, total, gradients)


def test_they_are_gathered_whole() -> None:
    """As numbers that any reader of arrays knows."""
    built = built_on_cpu(Case("one", training=ONE).job())
    with batches(built.job, built) as loader:
        built.step.backward(next(loader), 100)
    found = built.step.collect()
    for name, gradient in zip(built.weights.names, found, strict=True):
        assert torch.equal(built.weights.whole(found)[name], gradient.float())
