"""The held-out loss is one number, whatever the layout, and asking for it changes nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.data.corpus import open_corpus
from fivefold.training.build import build
from fivefold.training.ranks import run_ranks
from fivefold.training.validation import validate
from tests.cases import SPEC, TIED, Case, batches

CASES = {
    case.name: case
    for case in (
        Case("zero0", 2, {"zero": 0}, {"micro_batch": 2}),
        Case("zero2 tied", 2, {"zero": 2}, {"micro_batch": 2}, spec=TIED),
        Case("zero3 recomputed", 2, {"zero": 3}, {"micro_batch": 1, "recompute": "sqrt"}),
        Case("tp", 2, {"tp": 2}, {"micro_batch": 2}),
        Case("cp", 2, {"cp": 2}, {"micro_batch": 2}),
        Case("pp tied", 2, {"pp": 2}, {"micro_batch": 2}, spec=TIED),
    )
}
STEPS = 2


def train(world: World, job: Job, validating: bool) -> dict[str, Any]:
    """Losses of some steps, and the held-out losses between them."""
    built = build(job, world.device)
    corpus = open_corpus(
        "random", seq_len=job.training.seq_len, vocab_size=job.spec.vocab_size, document_length=7
    )
    found: dict[str, Any] = {"losses": [], "held out": [], "gathered": 0}
    with batches(job, built) as loader:
        for step in range(1, STEPS + 1):
            if validating:
                found["held out"].append(validate(job, built, corpus))
                whole = [p for p in built.model.parameters() if not isinstance(p, DTensor)]
                found["gathered"] += len(whole) if built.weights.sharded else 0
                assert all(part.training for part in built.parts)
            result = built.step(next(loader), 1e-2, step)
            found["losses"].append((result.loss, result.grad_norm))
    return found


def both_ways(world: World, jobs: dict[str, Job]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return {name: (train(world, job, True), train(world, job, False)) for name, job in jobs.items()}


@cache
def alone(tied: bool) -> dict[str, Any]:
    case = Case("alone", 1, training={"validate_batches": 2}, spec=TIED if tied else SPEC)
    return run_ranks(train, 1, case.job(), True)[0]


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[dict[str, Any], dict[str, Any]]]]:
    jobs = {}
    for name, case in CASES.items():
        jobs[name] = Case(name, 2, case.layout, case.training | {"validate_batches": 2}, spec=case.spec).job()
    return run_ranks(both_ways, 2, jobs)


@pytest.mark.parametrize("name", CASES)
def test_the_held_out_loss_is_that_of_one_process(found: Any, name: str) -> None:
    expected = alone("tied" in name)["held out"]
    assert len(set(expected)) == STEPS
    for rank in (0, 1):
        assert found[rank][name][0]["held out"] == pytest.approx(expected, rel=1e-12)
    assert found[0][name][0]["held out"] == found[1][name][0]["held out"]


@pytest.mark.parametrize("name", CASES)
def test_training_does_not_notice_a_validation(found: Any, name: str) -> None:
    validating, without = found[0][name]
    assert validating["losses"] == without["losses"]
    assert validating["gathered"] == 0, "weights that a validation gathered must be freed"


def test_the_held_out_loss_is_a_mean_over_tokens() -> None:
    """By hand, on one process: the sum of all token losses over the count of all tokens."""
    job = Case("by hand", training={"validate_batches": 2, "micro_batch": 4}, spec=SPEC).job()
    built = build(job, torch.device("cpu"))
    corpus = open_corpus("random", seq_len=16, vocab_size=67, document_length=5)
    with corpus.heldout_loader(8, 4) as loader:
        seen = [batch for _ in range(2) for batch in next(loader)]
    with torch.no_grad():
        total = sum(float(built.model(batch.tokens, batch.targets, batch.documents)) for batch in seen)
    tokens = sum(int((batch.targets != -100).sum()) for batch in seen)
    assert tokens < 2 * 8 * 16
    first = validate(job, built, corpus)
    assert first == pytest.approx(total / tokens, rel=1e-13)
    assert validate(job, built, corpus) == first
