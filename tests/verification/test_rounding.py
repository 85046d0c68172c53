"""The bounds of lower precisions: rounding stays below them, and what a bug does is above."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fivefold.comm.world import single_world
from fivefold.config import Job
from fivefold.verification.blame import on_one_process
from fivefold.verification.compare import differences
from fivefold.verification.compute import Computed, Taken, compute
from fivefold.verification.rounding import InJobPrecision, roundings, unit_roundoff
from fivefold.verification.shrink import shrink
from tests.cases import GEMMA, SPEC, TIED, Case

MOE = SPEC | {"experts": 4, "experts_per_token": 2}


def test_the_unit_roundoff_is_half_of_the_distance_to_the_next_number() -> None:
    assert unit_roundoff("bfloat16") == 2**-8
    assert unit_roundoff("float16") == 2**-11
    assert unit_roundoff("float32") == 2**-24


def test_the_bound_grows_with_the_root_of_the_depth_and_with_each_step() -> None:
    shallow, deep = (
        shrink(Case("depth", training={"recompute": recompute}, spec=SPEC | {"layers": layers}).job())
        for layers, recompute in ((2, "none"), (4, "sqrt"))
    )
    assert roundings(shallow) == 2 * 2 * 12 + 8
    assert roundings(deep) == 2 * 4 * 12 + 8
    measure = InJobPrecision.of(in_precision(shallow, "bf16"))
    assert measure.bound(1) == 2**-8 * math.sqrt(56)
    assert measure.bound(2) == 2 * measure.bound(1)
    tp = shrink(Case("sums", 4, {"tp": 4}, spec=SPEC | {"layers": 2}).job())
    assert roundings(tp) == roundings(shallow) + 2 * 2 * 2 * 3  # each sum has three more ranks to add


def in_precision(job: Job, precision: str) -> Job:
    training: dict[str, Any] = {"precision": precision}
    if job.spec.experts:
        training["routing"] = "balanced"
    return job.model_copy(update={"training": job.training.model_copy(update=training)})


@pytest.mark.parametrize("spec", [SPEC, TIED, GEMMA, MOE], ids=["llama", "gpt2", "gemma", "experts"])
def test_one_process_stays_below_the_bound_and_bugs_are_above_it(spec: dict[str, Any]) -> None:
    """By 1.5 times or more below, and gradients of twice or half the size, or without a row, are above."""
    small = shrink(Case("bound", spec=spec, training={"micro_batch": 2}).job())
    job = in_precision(small, "bf16")
    lower = [job, in_precision(small, "fp16"), in_precision(small, "fp32")]
    rows = job.training.global_batch
    alone = on_one_process(job)
    (reference,) = compute(single_world("cpu"), alone)
    lesser = alone.training.model_copy(update={"global_batch": rows - 1, "micro_batch": rows - 1})
    (without_a_row,) = compute(single_world("cpu"), alone.model_copy(update={"training": lesser}))
    for job, found in zip(lower, compute(single_world("cpu"), *lower), strict=True):
        measure = InJobPrecision.of(job)
        for each in differences(found, reference, measure):
            assert each.error <= each.bound / 1.5, f"{job.training.precision}: {each}"
        for wrong in (scaled(found, 2.0), scaled(found, 0.5), without_a_row):
            seen = {each.quantity for each in differences(wrong, reference, measure) if not each.ok}
            assert "gradient" in seen, job.training.precision


def scaled(found: Computed, factor: float) -> Computed:
    """The same run with gradients of another size."""

    def other(taken: Taken) -> Taken:
        return replace(taken, gradients={name: g * factor for name, g in taken.gradients.items()})

    return replace(found, steps=[other(taken) for taken in found.steps])


def test_what_weights_cannot_hold_of_an_update_is_no_error() -> None:
    """A weight of one, and its average, moved by less than float32 can tell from one."""
    tiny = {"norm": torch.full((4,), 1e-8, dtype=torch.float64)}
    weights = {"norm": torch.ones(4, dtype=torch.float64)}
    none = {"norm": torch.zeros(4, dtype=torch.float64)}
    larger = {"norm": torch.full((4,), 1e-3, dtype=torch.float64)}
    step = Taken(1.0, 1.0, tiny, tiny)
    reference = Computed([step], weights, tiny, tiny, {}, 1.0)
    measure = InJobPrecision(once=1e-3, stored=2**-24)

    def moves(found: Computed, reference: Computed) -> list[float]:
        return [each.error for each in differences(found, reference, measure) if "update" in each.quantity]

    assert moves(replace(reference, moved=none, averaged=none), reference) == [0.0, 0.0]
    further = replace(reference, moved=larger, averaged=larger)
    assert moves(replace(reference, moved=none, averaged=none), further) == pytest.approx([1, 1], rel=1e-3)
