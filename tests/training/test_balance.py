"""Balancing experts: the loss scale reaches the balancing term, and biases follow the tokens of all ranks."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import pytest
import torch

from fivefold.comm.world import World
from fivefold.models.moe import Moe
from fivefold.training.loss_scale import LossScale
from fivefold.training.ranks import run_ranks
from tests.cases import SPEC, Case, as_used, batches, built_on_cpu

MOE = SPEC | {"layers": 2, "experts": 4, "experts_per_token": 2}
HEAVY = {"balance": "loss", "balance_weight": 0.5, "clip": 0.0}
BIASED = {"balance": "bias", "balance_rate": 0.01, "clip": 0.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0},
    "zero 3": {"zero": 3},
    "ep": {"dp_shard": 2, "ep": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
}


def one_step(case: Case, scale: float | None = None) -> dict[str, Any]:
    """The gradients that the optimizer gets in one step, and the biases after it, on this rank."""
    job = case.job()
    built = built_on_cpu(job)
    if scale is not None:
        built.step.scale = LossScale(scale)
    found: dict[str, Any] = {}

    def note(lr: float, scale: torch.Tensor | None = None) -> None:
        found["gradients"] = as_used(built.weights.collect_gradients(), scale)

    built.optimizer.step = note  # type: ignore[method-assign]
    with batches(job, built) as loader:
        result = built.step(next(loader), 1e-2, 1)
    blocks = {number: block for part in built.parts for number, block in part.blocks.items()}
    biases = {number: cast(Moe, block.mlp).bias_steps.tolist() for number, block in blocks.items()}
    return found | {"norm": result.grad_norm, "imbalance": result.imbalance, "biases": biases}


def on_ranks(world: World) -> dict[str, Any]:
    found = {}
    for name, layout in LAYOUTS.items():
        heavy, biased = (
            Case(name, 2, layout, balance | {"micro_batch": 2}, spec=MOE) for balance in (HEAVY, BIASED)
        )
        found[name] = one_step(heavy), one_step(heavy, 2.0**10), one_step(biased)
    return found


@cache
def by_rank() -> list[dict[str, Any]]:
    return run_ranks(on_ranks, 2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loss_scale_leaves_no_trace_in_any_gradient(name: str) -> None:
    """In float64 a power of two changes no digit: what differs was not scaled, or not scaled back."""
    for found in by_rank():
        plain, scaled, _ = found[name]
        assert len(plain["gradients"]) > 3
        for one, other in zip(plain["gradients"], scaled["gradients"], strict=True):
            assert torch.equal(one, other)
        assert plain["norm"] == scaled["norm"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_biases_follow_the_tokens_of_all_ranks(name: str) -> None:
    alone = one_step(Case("alone", 1, {}, BIASED, spec=MOE))
    assert len({tuple(steps) for steps in alone["biases"].values()}) > 1
    for found in by_rank():
        _, _, biased = found[name]
        assert biased["imbalance"] == alone["imbalance"]
        assert biased["biases"].items() <= alone["biases"].items()
        assert biased["biases"]
