"""Whatever the layout, the numbers are those of one process: every gradient, and twenty steps of losses."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from fivefold.training.ranks import run_ranks
from fivefold.verification import gradient_error
from tests.cases import SPEC, TIED, Case, gradients, losses


def layouts(spec_name: str, spec: dict[str, Any]) -> list[Case]:
    """Every ZeRO stage, HSDP, accumulation and recompute mode, some of them together."""

    def case(name: str, ranks: int, layout: dict[str, Any], **training: Any) -> Case:
        return Case(f"{spec_name} {name}", ranks, layout, training, spec=spec)

    cases = []
    for zero in range(4):
        for accumulation in (1, 2, 4):
            micro = 8 // (2 * accumulation)
            cases.append(case(f"zero{zero} accumulate{accumulation}", 2, {"zero": zero}, micro_batch=micro))
    for zero in (2, 3):
        layout = {"zero": zero, "reduce": "step"}
        cases.append(case(f"zero{zero} reduce-by-step", 2, layout, micro_batch=1))
    for zero in (1, 2, 3):
        for micro in (2, 1):
            layout = {"zero": zero, "dp_replicate": 2, "dp_shard": 2}
            cases.append(case(f"hsdp zero{zero} micro{micro}", 4, layout, micro_batch=micro))
    cases.append(case("zero3 on 4", 4, {"zero": 3}))
    for mode in ("full", "every-2", "every-3", "sqrt", "selective"):
        cases.append(case(f"one process {mode}", 1, {}, recompute=mode))
        cases.append(case(f"zero3 {mode}", 2, {"zero": 3}, recompute=mode, micro_batch=2))
        cases.append(case(f"zero0 {mode}", 2, {"zero": 0}, recompute=mode))
    return cases


CASES = {case.name: case for case in layouts("untied", SPEC) + layouts("tied", TIED)}


@cache
def reference_gradients(spec_name: str) -> dict[str, Any]:
    return gradients(Case("reference", spec=TIED if spec_name == "tied" else SPEC).job())


@cache
def gradients_by_case(ranks: int) -> dict[str, dict[str, Any]]:
    """All cases of one rank count in one launch: starting ranks costs more than a step."""
    names = [name for name, case in CASES.items() if case.ranks == ranks]
    jobs = [CASES[name].job() for name in names]
    if ranks == 1:
        return dict(zip(names, map(gradients, jobs), strict=True))
    every_rank = run_ranks(all_gradients, ranks, jobs)
    for found in every_rank[1:]:
        for mine, theirs in zip(found, every_rank[0], strict=True):
            assert mine["loss"] == theirs["loss"]
            assert mine["norm"] == theirs["norm"]
    return dict(zip(names, every_rank[0], strict=True))


def all_gradients(world: Any, jobs: list[Any]) -> list[dict[str, Any]]:
    return [gradients(job) for job in jobs]


def all_losses(world: Any, jobs: list[Any]) -> list[list[tuple[float, float]]]:
    return [losses(job) for job in jobs]


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_that_of_one_process(name: str) -> None:
    case = CASES[name]
    found = gradients_by_case(case.ranks)[name]
    reference = reference_gradients(name.split()[0])
    error, parameter = gradient_error(found["gradients"], reference["gradients"])
    assert error <= 1e-12, f"{parameter} is off by {error:.1e}"
    assert found["tokens"] == reference["tokens"]
    assert found["loss"] == pytest.approx(reference["loss"], rel=1e-12)
    assert found["norm"] == pytest.approx(reference["norm"], rel=1e-12)


def test_twenty_adamw_steps_lose_alike() -> None:
    layouts = [{"zero": zero} for zero in range(4)]
    jobs = [Case("curve", 2, layout, {"micro_batch": 2}).job() for layout in layouts]
    reference = losses(Case("reference").job())
    for layout, curve in zip(layouts, run_ranks(all_losses, 2, jobs)[0], strict=True):
        for (loss, norm), (true_loss, true_norm) in zip(curve, reference, strict=True):
            assert loss == pytest.approx(true_loss, rel=1e-10), layout
            assert norm == pytest.approx(true_norm, rel=1e-9), layout
    assert len({loss for loss, _ in reference}) == 20


def test_single_precision_gradients_agree() -> None:
    reference = gradients(Case("reference", training={"precision": "fp32"}).job())["gradients"]
    jobs = [
        Case("fp32", 2, {"zero": zero}, {"precision": "fp32", "micro_batch": 2}).job() for zero in range(4)
    ]
    for found in run_ranks(all_gradients, 2, jobs)[0]:
        error, parameter = gradient_error(found["gradients"], reference)
        assert error <= 1e-4, parameter


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_errs_no_more_when_split(precision: str) -> None:
    exact = gradients(Case("exact").job())["gradients"]
    training = {"precision": precision, "loss_scale": 1.0}
    alone, _ = gradient_error(gradients(Case("alone", training=training).job())["gradients"], exact)
    jobs = [Case("half", 2, {"zero": zero}, training | {"micro_batch": 2}).job() for zero in range(4)]
    for found in run_ranks(all_gradients, 2, jobs)[0]:
        error, parameter = gradient_error(found["gradients"], exact)
        assert error <= 2 * alone, parameter
