"""Whatever the split, the numbers are those of one process: every gradient, and a few steps of losses."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from fivefold.training.ranks import run_ranks
from fivefold.verification import gradient_error
from tests.axes.layouts import BATCH, LENGTH, SPECS, SPLITS
from tests.axes.test_parity import all_gradients
from tests.cases import Case, gradients

LAUNCH = 16
"""Cases in one launch: each makes process groups, and their threads live as long as the ranks."""

NAMES = [pytest.param(n, marks=pytest.mark.slow) if s.slow else n for n, s in SPLITS.items()]


STEPS = 3


@cache
def reference(model: str) -> dict[str, Any]:
    training = {"global_batch": BATCH, "seq_len": LENGTH}
    return gradients(Case("one", training=training, spec=SPECS[model]).job(), STEPS)


def gradients_and_curves(world: Any, jobs: list[Any]) -> list[dict[str, Any]]:
    return [gradients(job, STEPS) for job in jobs]


@cache
def found(ranks: int, slow: bool, launch: int) -> dict[str, Any] | Exception:
    """What a launch of some cases gave, by name; one that failed is not tried again for each of them."""
    names = [n for n, s in SPLITS.items() if s.ranks == ranks and s.slow == slow]
    names = names[launch * LAUNCH : (launch + 1) * LAUNCH]
    try:
        every_rank = run_ranks(gradients_and_curves, ranks, [SPLITS[name].case().job() for name in names])
    except Exception as error:
        return error
    for other in every_rank[1:]:
        for mine, theirs in zip(other, every_rank[0], strict=True):
            assert (mine["loss"], mine["norm"]) == (theirs["loss"], theirs["norm"])
            assert mine["curve"] == theirs["curve"]
    return dict(zip(names, every_rank[0], strict=True))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_and_a_few_steps_are_those_of_one_process(name: str) -> None:
    split = SPLITS[name]
    alike = [n for n, s in SPLITS.items() if s.ranks == split.ranks and s.slow == split.slow]
    results = found(split.ranks, split.slow, alike.index(name) // LAUNCH)
    if isinstance(results, Exception):
        raise results
    result = results[name]
    true = reference(split.model)
    error, parameter = gradient_error(result["gradients"], true["gradients"])
    assert error <= 1e-11, f"{parameter} is off by {error:.1e}"
    assert result["tokens"] == true["tokens"]
    assert result["loss"] == pytest.approx(true["loss"], rel=1e-11)
    assert result["norm"] == pytest.approx(true["norm"], rel=1e-11)
    assert len({loss for loss, _ in true["curve"]}) == STEPS
    for (loss, norm), (true_loss, true_norm) in zip(result["curve"], true["curve"], strict=True):
        assert loss == pytest.approx(true_loss, rel=1e-9)
        assert norm == pytest.approx(true_norm, rel=1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_half_precision_errs_no_more_when_split(model: str, precision: str) -> None:
    """Against float64, at most twice the error of one process in the same precision."""
    training = {"precision": precision, "global_batch": BATCH, "seq_len": LENGTH, "loss_scale": 64.0}
    if model == "experts":
        training |= {"routing": "balanced"}  # else rounding sends some tokens to other experts
    exact = gradients(Case("exact", training=training | {"precision": "fp64"}, spec=SPECS[model]).job())
    alone = gradients(Case("alone", training=training, spec=SPECS[model]).job())
    scale = 64.0 if precision == "fp16" else 1.0
    layouts: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"cp": 2, "zero": 3}]
    layouts += [{"pp": 2, "schedule": "zbv"}, {"cp": 2, "cp_kind": "ulysses", "zero": 2}]
    if model == "experts":
        layouts = [{"dp_shard": 2, "ep": 2}, {"tp": 2}, {"pp": 2}]
    jobs = [
        Case(
            "half",
            2,
            {"dp_replicate": 1, "dp_shard": 1} | layout,
            training | {"micro_batch": 2},
            spec=SPECS[model],
        )
        for layout in layouts
    ]
    error_alone, _ = gradient_error(unscaled(alone, scale), exact["gradients"])
    for layout, result in zip(layouts, run_ranks(all_gradients, 2, [c.job() for c in jobs])[0], strict=True):
        error, parameter = gradient_error(unscaled(result, scale), exact["gradients"])
        assert error <= 2 * error_alone, (layout, parameter)


def unscaled(result: dict[str, Any], scale: float) -> dict[str, Any]:
    return {name: gradient / scale for name, gradient in result["gradients"].items()}
