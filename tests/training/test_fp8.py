"""Training in 8 bits: what is not finite, figures, devices, and the line that a job begins with."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.comm.world import World
from fivefold.config import Job, load, resolve
from fivefold.training import preflight
from fivefold.training.build import Built
from fivefold.training.failures import NonFiniteError
from fivefold.training.meter import Meter
from tests.axes.test_fp8_split import EXPERTS, WIDE, case
from tests.cases import batches, built_on_cpu
from tests.ranks import on_ranks

SCALES = ["tensorwise", "rowwise"]


def job_of(scales: str, ranks: int = 1, non_finite: str = "stop", **layout: Any) -> Job:
    job = case("training", ranks, layout, {"fp8": scales}, WIDE).job()
    resilience = job.resilience.model_copy(update={"non_finite": non_finite})
    return job.model_copy(update={"resilience": resilience})


@pytest.mark.parametrize(
    ("major", "minor", "there"), [(8, 9, False), (9, 0, True), (10, 0, True), (12, 0, False)]
)
def test_a_gpu_without_a_kernel_for_experts_is_refused(
    major: int, minor: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(name="A GPU", major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    job = case("experts", 1, {}, {"fp8": "rowwise"}, EXPERTS).job()
    found = preflight.fp8_problems(job, "cuda")
    assert [problem.key for problem in found] == ([] if there else ["training.fp8"])
    assert all("model.experts: a A GPU has no kernel" in problem.message for problem in found)
    assert preflight.fp8_problems(job, "cpu") == []


def planted(built: Built, where: str, value: float) -> None:
    """A number that is none, where it comes up first."""
    block = built.parts[0].blocks["1"]
    if where == "weight":
        with torch.no_grad():
            built.weights.masters[built.weights.names.index("blocks.1.mlp.up.weight")][0, 0] = value
        built.weights.publish()
    elif where == "input":
        block.attention.core.register_forward_hook(lambda module, args, mixed: mixed * value)  # type: ignore[union-attr, operator]
    else:
        block.mlp.register_forward_hook(lambda module, args, out: _Spoilt.apply(out, value))  # type: ignore[union-attr, operator]


class _Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.value, None


NAMED = {
    "weight": "the weight of blocks.1.mlp.up",
    "input": "the input of blocks.1.attention.output",
    "gradient": "the output gradient of blocks.1.mlp.down",
}


def third_step(world: World, job: Job, where: str, value: float) -> str:
    built = built_on_cpu(job)
    with batches(job, built) as loader:
        for step in (1, 2):
            built.step(next(loader), 1e-3, step)
        planted(built, where, value)
        with pytest.raises(NonFiniteError) as caught:
            built.step(next(loader), 1e-3, 3)
    return str(caught.value)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("where", NAMED)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_the_layer_in_which_it_came_up_first_is_named(scales: str, where: str, value: float) -> None:
    (told,) = on_ranks(third_step, 1, job_of(scales), where, value)
    assert told.startswith("step 3: ")
    assert f"(first seen in {NAMED[where]}) is not finite." in told


@pytest.mark.parametrize("scales", SCALES)
def test_experts_are_named(scales: str) -> None:
    """Once their weights are not finite, all that they make is so, and with it the next block's input."""
    built = built_on_cpu(case("experts", 1, {}, {"fp8": scales}, EXPERTS).job())
    name = "blocks.1.mlp.experts.up"
    with batches(built.job, built) as loader:
        with torch.no_grad():
            built.weights.masters[built.weights.names.index(f"{name}.weight")][2, 0, 0] = math.nan
        built.weights.publish()
        with pytest.raises(NonFiniteError, match=f"first seen in the weight of {name}"):
            built.step(next(loader), 1e-3, 1)


@pytest.mark.parametrize("scales", SCALES)
def test_experts_are_named_by_their_weights_gradients(scales: str) -> None:
    built = built_on_cpu(case("experts", 1, {}, {"fp8": scales}, EXPERTS).job())
    experts = built.parts[0].blocks["1"].mlp.experts  # type: ignore[union-attr]
    experts.register_forward_hook(lambda module, args, out: _Spoilt.apply(out, math.nan))  # type: ignore[union-attr, operator]
    with (
        batches(built.job, built) as loader,
        pytest.raises(NonFiniteError, match=r"seen in the output gradient of blocks.1.mlp.experts.down"),
    ):
        built.step(next(loader), 1e-3, 1)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("where", NAMED)
def test_tp_ranks_name_it_too(scales: str, where: str) -> None:
    for told in on_ranks(third_step, 2, job_of(scales, 2, tp=2), where, math.nan):
        assert f"(first seen in {NAMED[where]})" in told


def test_after_a_skipped_step_what_was_seen_is_forgotten() -> None:
    job = job_of("tensorwise", non_finite="skip")
    built = built_on_cpu(job)
    index = built.weights.names.index("blocks.1.mlp.up.weight")
    with batches(job, built) as loader:
        planted(built, "weight", math.nan)
        first = built.step(next(loader), 1e-3, 1)
        with torch.no_grad():
            built.weights.masters[index][0, 0] = 0.0
        built.weights.publish()
        second = built.step(next(loader), 1e-3, 2)
        planted(built, "gradient", math.nan)
        third = built.step(next(loader), 1e-3, 3)
    assert first.skipped
    assert not second.skipped
    assert "blocks.1.mlp.up" in (first.problem or "")
    assert NAMED["gradient"] in (third.problem or "")


def test_mfu_is_of_the_peak_in_bf16_and_beside_it_of_that_in_8_bits() -> None:
    meter = Meter(job_of("rowwise"), torch.device("cpu"))
    assert meter.figures(1.0)["mfu_fp8"] is None
    meter.peak, meter.fp8_peak = 1e9, 2e9
    figures = meter.figures(1.0)
    assert figures["mfu"] is not None
    assert figures["mfu_fp8"] == pytest.approx(figures["mfu"] / 2)
    assert meter.convention.endswith("dense peak 0 TFLOP/s in bf16, mfu_fp8: of 0 in fp8")


@pytest.mark.parametrize(("major", "minor", "there"), [(8, 0, False), (8, 9, True), (9, 0, True)])
def test_a_gpu_without_it_is_refused_before_ranks_start(
    major: int, minor: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(name="A GPU", major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    found = preflight.fp8_problems(job_of("rowwise"), "cuda")
    assert [problem.key for problem in found] == ([] if there else ["training.fp8"])
    assert all("A GPU does not compute in 8 bits" in problem.message for problem in found)
    assert preflight.fp8_problems(resolve(load(None, "tiny"), 1), "cuda") == []
    assert preflight.fp8_problems(job_of("rowwise"), "cpu") == []
