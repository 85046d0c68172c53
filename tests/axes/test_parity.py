"""Whatever the split, the numbers are those of one process: every gradient, clipped, and a few losses."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import pytest
import torch

from fivefold.axes.checks import check
from fivefold.config import Job
from fivefold.verification import gradient_error
from tests.axes.layouts import COVERING, SPLITS, Split
from tests.axes.make_covering import written
from tests.cases import Case, first_steps
from tests.ranks import on_ranks

STEPS = 3
CLIP = 0.1
"""Far below the norm of every model's gradients."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDINGS = 4 * 14 * 2
"""Roundings in a row between a token and the first gradient: 14 in each of 4 layers, there and back."""

NAMES = [pytest.param(n, id=n, marks=[pytest.mark.slow] * s.slow) for n, s in SPLITS.items()]


def clipped(case: Case) -> Job:
    training = case.training | {"clip": CLIP, "loss_scale": 64.0}
    return Case(case.name, case.ranks, case.layout, training, spec=case.spec).job()


def train(world: Any, job: Job) -> dict[str, Any]:
    return first_steps(job, STEPS)


@cache
def _trained(case: str) -> dict[str, Any]:
    training, spec = json.loads(case)
    return first_steps(clipped(Case("one process", training=training, spec=spec)), STEPS)


def of_one_process(split: Split) -> dict[str, Any]:
    """The same steps on one process, in float64."""
    case = split.one_process()
    return _trained(json.dumps([case.training, case.spec], sort_keys=True))


def bounds(split: Split) -> tuple[float, float]:
    """How far a gradient may be off, of its largest entry; and a loss or norm of later steps, of itself.

    Roundings of either sign add up as their number's square root; the worst entry of thousands is off by
    three times that. Later steps have made larger what was off in the first.
    """
    if (precision := dict(split.training).get("precision")) is not None:
        rounding = torch.finfo(DTYPES[precision]).eps / 2
        return 3 * math.sqrt(ROUNDINGS) * rounding, ROUNDINGS * rounding
    of_data_alone = split.degrees.keys() <= {"dp_replicate", "dp_shard", "zero", "reduce"}
    return 1e-12 if of_data_alone else 1e-11, 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_as_one_process(name: str) -> None:
    split = SPLITS[name]
    true = of_one_process(split)
    assert all(norm > 2 * CLIP for _, norm in true["curve"])
    assert len({loss for loss, _ in true["curve"]}) == STEPS

    found, *others = on_ranks(train, split.ranks, clipped(split.case()))
    assert all(other["curve"] == found["curve"] for other in others)
    first, later = bounds(split)
    error, parameter = gradient_error(found["gradients"], true["gradients"])
    assert error <= first, f"{parameter} is off by {error:.1e}"
    for step, (mine, theirs) in enumerate(zip(found["curve"], true["curve"], strict=True)):
        assert mine == pytest.approx(theirs, rel=later if step else first), f"step {step + 1}"


# --- the list ----------------------------------------------------------------------------------------------


def test_every_layout_is_allowed_and_the_fast_ones_have_several_rows() -> None:
    for split in SPLITS.values():
        job = split.case().job()
        assert check(job) == [], split.name
        assert split.slow or (job.training.micro_batch or 1) >= 2, split.name


@pytest.mark.slow
def test_the_covering_layouts_are_those_that_are_drawn() -> None:
    assert COVERING.read_text() == written(), "python -m tests.axes.make_covering"
