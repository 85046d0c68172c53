"""Numbers that are no numbers end the run: step, rank and parameter are named, the weights stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.training.build import Built, build
from fivefold.training.failures import NonFiniteError, RanksFailed
from fivefold.training.ranks import run_ranks
from tests.cases import Case, batches

PLANTED = "blocks.1.mlp.up.weight"


def poison_weight(built: Built, value: float) -> None:
    """In this rank's own part of one parameter."""
    with torch.no_grad():
        built.weights.masters[built.weights.names.index(PLANTED)][0, 0] = value
    built.weights.publish()


def poison_gradient(built: Built, value: float) -> None:
    """In what backward computes for one parameter; the loss stays finite."""
    built.weights.parameters[built.weights.names.index(PLANTED)].register_hook(lambda g: g * value)


def third_step(world: World, job: Job, plant: str, value: float, guilty: int) -> tuple[str, bool]:
    """Two good steps, then a bad one: its error, and whether it left all masters alone."""
    built = build(job, world.device)
    with batches(job, built) as loader:
        for step in (1, 2):
            built.step(next(loader), 1e-3, step)
        if world.rank == guilty:
            {"weight": poison_weight, "gradient": poison_gradient}[plant](built, value)
        before = [master.detach().clone() for master in built.weights.masters]
        with pytest.raises(NonFiniteError) as caught:
            built.step(next(loader), 1e-3, 3)
    assert caught.value.step == 3
    same = all(
        torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7))
        for a, b in zip(before, built.weights.masters, strict=True)
    )
    return str(caught.value), same


def all_third_steps(world: World, cases: list[tuple[Any, ...]]) -> list[tuple[str, bool]]:
    return [third_step(world, *case) for case in cases]


NAN, INF = float("nan"), float("inf")


def job(ranks: int, zero: int | None) -> Job:
    layout = {} if zero is None else {"zero": zero}
    return Case("non-finite", ranks, layout, {"precision": "fp32", "micro_batch": 2}).job()


def test_on_two_ranks() -> None:
    wanted = {
        # Whole weights: only the rank that holds the bad one computes a bad loss.
        (job(2, 0), "weight", NAN, 1): "step 3: the loss on rank 1 is not finite",
        (job(2, 0), "gradient", INF, 1): f"the gradient of {PLANTED} on rank 0",
        # Sharded weights are gathered, so every rank's loss is bad.
        (job(2, 3), "weight", NAN, 1): "step 3: the loss on rank 0 and the loss on rank 1 is not finite",
        (job(2, 2), "weight", INF, 0): "step 3: the loss on rank 0",
    }
    cases = [(given, *rest) for given, *rest in wanted]
    for found in run_ranks(all_third_steps, 2, cases):
        for (message, same), text in zip(found, wanted.values(), strict=True):
            assert text in message
            assert "The weights are those of step 2" in message
            assert same


def test_on_one_process() -> None:
    alone = job(1, None)
    cases = [
        (alone, "weight", NAN, 0, "the loss on rank 0"),
        (alone, "gradient", NAN, 0, f"the gradient of {PLANTED} on rank 0"),
        (alone, "gradient", 1e38, 0, "the gradient norm (each gradient is finite"),
    ]
    for *case, text in cases:
        (message, same), *_ = run_ranks(third_step, 1, *case)
        assert message.startswith(f"step 3: {text}")
        assert same


def fail(world: World, job: Job) -> None:
    built = build(job, world.device)
    if world.rank == 1:
        poison_weight(built, NAN)
    with batches(job, built) as loader:
        built.step(next(loader), 1e-3, 1)


def test_the_launcher_tells_it_with_the_step() -> None:
    with pytest.raises(
        RanksFailed, match="NonFiniteError: step 1: the loss on rank 1 is not finite"
    ) as caught:
        run_ranks(fail, 2, job(2, 0))
    assert caught.value.failures[0].step == 1
