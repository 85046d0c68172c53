"""Error feedback under every layout: what is applied is right in the long run, and nothing of it is lost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.config.schema import Resilience
from fivefold.training.build import Built
from fivefold.training.checkpoint import Progress, load_latest
from fivefold.training.loss_scale import GROWTH_INTERVAL
from fivefold.training.residuals import parameter_of
from tests.cases import SPEC, TIED, Case, batches, built_on_cpu, gradients, save
from tests.ranks import on_ranks

STEPS = 16
INT8 = {"compress": "int8"}
FP32 = {"precision": "fp32"}
MICRO = FP32 | {"micro_batch": 1}
MOE = SPEC | {"experts": 4, "experts_per_token": 2}
HSDP = {"dp_replicate": 2, "dp_shard": 2, "zero": 3}


def compressed(
    name: str,
    ranks: int,
    layout: dict[str, Any],
    training: Any = FP32,
    spec: Any = SPEC,
    **communication: Any,
) -> Case:
    return Case(name, ranks, layout, training, spec=spec, communication=INT8 | communication)


CASES = {
    case.name: case
    for case in (
        compressed("zero 0", 2, {"zero": 0}, MICRO),
        compressed("zero 1", 2, {"zero": 1}, MICRO),
        compressed("zero 2", 2, {"zero": 2}, MICRO, TIED),
        compressed("zero 3", 2, {"zero": 3}, MICRO),
        compressed("zero 3, 16 bits", 2, {"zero": 3}, MICRO, compress="bf16"),
        compressed("zero 0, in bf16", 2, {"zero": 0}, {"precision": "bf16", "micro_batch": 2}),
        compressed("cp 2", 2, {"cp": 2, "zero": 3}),
        compressed("HSDP", 4, HSDP, MICRO),
        compressed("HSDP by step", 4, HSDP | {"zero": 1}, MICRO),
        compressed("HSDP, replicas alone", 4, HSDP, MICRO, compress_on="replicate"),
        compressed("zero 3 x tp 2", 4, {"dp_shard": 2, "tp": 2, "zero": 3}, MICRO, TIED),
        compressed("zero 0 x tp 2", 4, {"dp_replicate": 2, "tp": 2, "zero": 0}),
        compressed("zero 3 x pp 2", 4, {"dp_shard": 2, "pp": 2, "zero": 3}, FP32 | {"micro_batch": 2}, TIED),
        compressed("experts", 2, {"zero": 3}, FP32, MOE),
        compressed("ep 2 of 4", 4, {"dp_shard": 4, "ep": 2, "zero": 3}, FP32, MOE),
    )
}
SLOW = {name for name, case in CASES.items() if case.ranks == 4} - {"HSDP", "ep 2 of 4"}


def mean_of_steps(world: World, job: Job) -> dict[str, Any]:
    """Whole gradients, as they are applied, of many steps with the same batch and weights: their mean."""
    built = built_on_cpu(job)
    with batches(job, built) as loader:
        micro_batches = next(iter(loader))
    total = [torch.zeros_like(master) for master in built.weights.masters]
    for _ in range(STEPS):
        tokens = built.step.count_tokens(micro_batches)
        built.step.backward(micro_batches, tokens)
        for one, gradient in zip(total, built.step.collect(), strict=True):
            one += gradient
        built.weights.clear_gradients()
    return {name: value.double() / STEPS for name, value in built.weights.whole(total).items()}


def norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def true_gradients(world: World, job: Job) -> dict[str, Any]:
    return dict(gradients(job)["gradients"])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_the_mean_of_many_steps_is_the_true_gradient(name: str) -> None:
    """One step is off by up to 1/254 of a block's largest; of the mean only the last one's share is left."""
    case = CASES[name]
    communication = case.job().communication
    plain = case.job().model_copy(update={"communication": type(communication)()})
    off = case.job().model_copy(
        update={"communication": communication.model_copy(update={"error_feedback": False})}
    )
    (true, near, far) = (
        on_ranks(function, case.ranks, job)[0]
        for function, job in ((true_gradients, plain), (mean_of_steps, case.job()), (mean_of_steps, off))
    )
    assert true.keys() == near.keys()
    off_by = [norm([found[key] - true[key] for key in true]) for found in (near, far)]
    size = norm(true.values())
    assert 1e-5 * size < off_by[1] < 0.02 * size  # it does round
    assert off_by[0] < off_by[1] / 5


# --- as state ----------------------------------------------------------------------------------------------

MOVES: dict[str, tuple[Case, Case]] = {
    f"{one} -> {other}": (CASES[one], CASES[other])
    for one, other in (
        ("zero 0", "zero 3"),
        ("zero 3", "HSDP"),
        ("HSDP", "zero 1"),
        ("zero 0 x tp 2", "zero 3"),
        ("zero 3 x tp 2", "zero 3 x pp 2"),
        ("zero 3 x pp 2", "zero 2"),
        ("ep 2 of 4", "experts"),
        ("experts", "ep 2 of 4"),
    )
    if CASES[one].spec == CASES[other].spec
}


def total(built: Built) -> dict[str, torch.Tensor]:
    """By keeper and parameter, whole."""
    found: dict[str, torch.Tensor] = {}
    for name, value in built.step.residuals.state().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = whole.float().clone()
    return found


def some_steps(world: World, job: Job, folder: Path) -> dict[str, torch.Tensor]:
    built = built_on_cpu(job)
    with batches(job, built) as loader:
        for step in (1, 2):
            built.step(next(loader), 1e-3, step)
    save(built, folder, Progress(2, 256))
    return total(built)


def taken_up(world: World, job: Job, folder: Path) -> dict[str, torch.Tensor]:
    built = built_on_cpu(job)
    progress, _ = load_latest(built, folder)
    assert progress is not None
    return total(built)


def summed(by_rank: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """By parameter, what all keepers have: each name counts once, whichever ranks share it."""
    found: dict[str, torch.Tensor] = {}
    for name, value in {name: value for each in by_rank for name, value in each.items()}.items():
        parameter = parameter_of(name)
        found[parameter] = found.get(parameter, torch.zeros_like(value)) + value
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "x" in name else []) for name in MOVES]
)
def test_under_another_layout_their_sum_is_dealt_out_anew(name: str, tmp_path: Path) -> None:
    before, after = MOVES[name]
    saved = on_ranks(some_steps, before.ranks, before.job(), tmp_path)
    found = on_ranks(taken_up, after.ranks, after.job(), tmp_path)
    wanted, have = summed(saved), summed(found)
    assert wanted.keys() == have.keys()
    for parameter, value in wanted.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(have[parameter], value, rtol=0, atol=0.01 * float(value.abs().max()))


def test_a_job_without_compression_takes_up_the_rest(tmp_path: Path) -> None:
    on_ranks(some_steps, 2, CASES["zero 3"].job(), tmp_path)
    assert on_ranks(taken_up, 2, Case("", 2, {"zero": 3}, MICRO).job(), tmp_path) == [{}, {}]


# --- numbers that are not finite ---------------------------------------------------------------------------


def with_a_bad_step(world: World, job: Job) -> list[Any]:
    """The second of three steps has a gradient that is not finite, on rank 1."""
    built, found, bad = built_on_cpu(job), [], False

    def poison(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if bad and output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.inf)

    if world.rank == 1:
        built.parts[-1].register_forward_hook(poison)
    with batches(job, built) as loader:
        for step in (1, 2, 3):
            bad = step == 2
            result = built.step(next(loader), 1e-2, step)
            largest = max(float(residual.value.abs().max()) for residual in built.step.residuals.all)
            found.append((result.skipped, math.isfinite(result.loss), largest))
    return found


@pytest.mark.parametrize("name", ["zero 0", "zero 3", "HSDP"])
def test_a_step_that_is_not_finite_is_skipped_and_leaves_nothing_behind(name: str) -> None:
    job = CASES[name].job().model_copy(update={"resilience": Resilience(non_finite="skip")})
    for first, second, third in on_ranks(with_a_bad_step, CASES[name].ranks, job):
        assert (first[0], second[0], third[0]) == (False, True, False)
        assert first[2] > 0
        assert second[2] == 0
        assert 0 < third[2] < math.inf


def scaled(world: World, job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Residuals of a step before the loss scale doubles, and when the step is done."""
    built, before = built_on_cpu(job), list[torch.Tensor]()
    totals, residuals = built.step.totals, built.step.residuals.all

    def look(*args: Any) -> Any:
        before[:] = [residual.value.clone() for residual in residuals]
        return totals(*args)

    built.step.totals = look  # type: ignore[method-assign, assignment]
    assert built.step.scale is not None
    built.step.scale.good_steps = GROWTH_INTERVAL - 1
    with batches(job, built) as loader:
        built.step(next(loader), 1e-3, 1)
    return list(zip(before, (residual.value for residual in residuals), strict=True))


def test_residuals_follow_the_loss_scale() -> None:
    case = compressed("fp16", 2, {"zero": 0}, {"precision": "fp16", "loss_scale": 1024.0})
    for pairs in on_ranks(scaled, 2, case.job()):
        assert pairs
        for before, after in pairs:
            assert before.abs().max() > 0
            assert torch.equal(after, 2 * before)
