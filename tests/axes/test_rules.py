"""The rules of what is possible: a search is limited by those that refuse jobs, and by all of them."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fivefold.axes import tensor
from fivefold.axes.checks import AXES, check, possible
from fivefold.axes.rules import rule
from fivefold.config import Communication, Job, resolve
from fivefold.hardware.presets import CLUSTERS
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.planner.answer import Answer
from fivefold.planner.search.candidates import candidates
from fivefold.planner.why import why
from fivefold.problems import BadInput, Problem
from tests.axes.layouts import KINDS, SCHEDULES
from tests.cases import SPEC
from tests.planner.goals import goal_for

NUMBERS = ("micro_batch", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "virtual_stages")
EXPERTS = {"experts": 6, "experts_per_token": 2}
SPECS: tuple[dict[str, Any], ...] = (
    SPEC | {"layers": 5, "ffn": 38},
    SPEC | {"layers": 8, "vocab_size": 5, "kv_heads": 1},
    SPEC | {"layers": 8, "heads": 12, "kv_heads": 6, "head_dim": 8, "sliding_window": 20},
    SPEC | {"layers": 6, "heads": 12, "kv_heads": 4, "head_dim": 8} | EXPERTS,
)


def numbers(draw: random.Random) -> dict[str, Any]:
    """Degrees of one layout. Mostly ones, so that many a layout is possible."""
    return {
        "micro_batch": draw.choice((1, 1, 2, 3)),
        "dp_replicate": draw.choice((1, 1, 2, 3)),
        "dp_shard": draw.choice((1, 1, 2, 4)),
        "cp": draw.choice((1, 1, 1, 2, 3, 4)),
        "tp": draw.choice((1, 1, 1, 2, 3, 4, 6)),
        "pp": draw.choice((1, 1, 2, 3, 4)),
        "ep": draw.choice((1, 1, 1, 2, 3, 4)),
        "virtual_stages": draw.choice((1, 1, 1, 2, 2, 3)),
    }


def structure(draw: random.Random) -> dict[str, Any]:
    """What many layouts share, such as a search has it: sometimes what goes badly together."""
    return {
        "spec": ModelSpec(**draw.choice(SPECS)),
        "seq_len": draw.choice((12, 16, 24, 24, 48, 65)),
        "global_batch": draw.choice((12, 24, 48, 48, 60)),
        "precision": PRECISIONS["bf16"],
        "zero": draw.choice((0, 0, 1, 2, 3)),
        "schedule": draw.choice(("", "", *SCHEDULES)),
        "cp_kind": draw.choice(("", "", *KINDS)),
        "recompute": draw.choice(("none", "full", "selective")),
        "sequence_parallel": draw.random() < 0.8,
        "reduce": draw.choice(("auto", "auto", "auto", "step", "micro-batch")),
        "tp_overlap": draw.random() < 0.1,
        "compress": draw.choice(("int8", "bf16")) if draw.random() < 0.1 else "none",
        "compress_on": "replicate" if draw.random() < 0.1 else "all",
        "error_feedback": draw.random() < 0.95,
        **(outer_steps(draw) if draw.random() < 0.2 else {}),
    }


def outer_steps(draw: random.Random) -> dict[str, Any]:
    return {
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "local_steps": draw.choice((1, 2, 4)),
        "fragments": draw.choice((1, 1, 2)),
        "outer_delay": draw.choice((0, 1, 3)),
        "outer_mix": draw.choice((0.0, 0.0, 0.5)),
    }


def fitted(setup: Setup, draw: random.Random) -> Setup:
    """The setup with its commonest contradictions mended, each more often than not: so each shows alone."""
    mended: dict[str, Any] = {
        "schedule": (setup.schedule or "1f1b") if setup.pp > 1 else "",
        "virtual_stages": setup.virtual_stages if setup.pp > 1 else 1,
        "cp_kind": (setup.cp_kind or "ring") if setup.cp > 1 else "",
        "dp_shard": setup.dp_shard if setup.zero else 1,
        "ep": setup.ep if setup.spec.experts else 1,
        "reduce": setup.reduce if setup.zero > 1 else "auto",
    }
    return replace(setup, **{name: value for name, value in mended.items() if draw.random() < 0.9})


def job_of(setup: Setup) -> Job:
    """The job that says what the setup says, and leaves open what it does not use."""
    layout: dict[str, Any] = {axis: getattr(setup, axis) for axis in NUMBERS if axis != "micro_batch"}
    layout |= {
        "zero": setup.zero,
        "reduce": setup.reduce,
        "sequence_parallel": setup.sequence_parallel,
        "schedule": setup.schedule or None,
        "cp_kind": setup.cp_kind or None,
    }
    if setup.pp == setup.virtual_stages == 1:
        del layout["virtual_stages"]
    training = {
        "micro_batch": setup.micro_batch,
        "global_batch": setup.global_batch,
        "seq_len": setup.seq_len,
        "recompute": setup.recompute,
        "precision": setup.precision.name,
    }
    return Job.model_validate(
        {
            "model": setup.spec.model_dump(exclude_unset=True),
            "training": training,
            "layout": layout,
            "communication": {key: getattr(setup, key) for key in Communication.model_fields},
        }
    )


def complaints(setup: Setup) -> set[str]:
    """The keys that `resolve` and `check` complain of, or that they change."""
    ranks = math.prod(getattr(setup, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
    try:
        job = resolve(job_of(setup), ranks, device="cuda")
    except BadInput as refusal:
        return {problem.key for problem in refusal.problems}
    changed = {"changed"} if Setup.of(job) != setup else set()
    return changed | {problem.key for problem in check(job)}


def test_the_verdict_is_that_of_resolve_and_check() -> None:
    draw = random.Random(11)
    seen: Counter[str] = Counter()
    for _ in range(2500):
        setup = fitted(Setup(**structure(draw), **numbers(draw)), draw)
        found = complaints(setup)
        assert possible(setup) is (not found), (found, setup)
        seen["allowed" if not found else "+".join(sorted(found))] += 1
    # The draw must reach both verdicts, and every complaint as the only one.
    assert seen["allowed"] > 200
    for key in (
        "layout.tp",
        "layout.cp",
        "layout.pp",
        "layout.ep",
        "layout.cp_kind",
        "layout.virtual_stages",
        "layout.reduce",
        "layout.schedule",
        "training.seq_len",
        "training.global_batch",
        "training.recompute",
        "communication.tp_overlap",
        "communication.compress",
        "communication.compress_on",
        "communication.error_feedback",
        "communication.local_steps",
        "communication.fragments",
        "communication.outer_delay",
        "communication.outer_mix",
        "changed",
    ):
        assert seen[key], key


@pytest.mark.parametrize("seed", range(12))
def test_many_layouts_at_once(seed: int) -> None:
    draw = random.Random(seed)
    shared = structure(draw)
    rows = [numbers(draw) for _ in range(100)]
    columns: dict[str, Any] = {name: np.array([row[name] for row in rows]) for name in NUMBERS}
    found = possible(Setup(**shared, **columns))
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [possible(Setup(**shared, **row)) for row in rows]


def test_one_number_for_all_layouts_may_stand_beside_arrays() -> None:
    spec = ModelSpec(**SPECS[0])
    setup = Setup(spec, 16, 24, PRECISIONS["bf16"], tp=np.array([1, 2, 3]), dp_replicate=2)
    assert np.array_equal(possible(setup), [True, True, False])


@rule("layout.tp", lambda setup: setup.tp != 4)
def not_four(setup: Setup) -> tuple[str, str]:
    return f"{setup.tp} is one too many", "Use layout.tp = 2."


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.__name__)
def test_a_rule_planted_in_one_axis_refuses_jobs_and_limits_the_search(
    axis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {"seq_len": 64, "global_batch": 8, "precision": "fp32"}
    goal = goal_for(PRESETS["tiny"], 4, seq_len=64, global_batch=8, precision="fp32")
    job = resolve(Job.model_validate({"training": training, "layout": {"tp": 4}}), 4)

    def degrees() -> set[int]:
        return {int(tp) for setup in candidates(goal) for tp in np.asarray(setup.tp)}

    assert check(job) == []
    assert degrees() == {1, 2, 4}
    monkeypatch.setattr(axis, "RULES", (*axis.RULES, not_four))
    refused = [Problem("layout.tp", "4 is one too many", "Use layout.tp = 2.")]
    assert check(job) == check(job, [axis]) == refused
    assert degrees() == {1, 2}


def test_a_planted_rule_is_the_reason_that_a_plan_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Answer(goal_for(PRESETS["tiny"], 4), CLUSTERS["dgx-h100"])
    assert why({"tp": 4}, found).verdict == "slower"
    monkeypatch.setattr(tensor, "RULES", (*tensor.RULES, not_four))
    refused = why({"tp": 4}, found)
    assert refused.verdict == "impossible"
    assert refused.sentence == "layout.tp: 4 is one too many."
    assert refused.remedies == ["Use layout.tp = 2."]


def test_what_is_wrong_can_be_said_whatever_else_is_wrong() -> None:
    draw = random.Random(5)
    for _ in range(1500):
        setup = Setup(**structure(draw), **numbers(draw))
        broken = (rule for axis in AXES for rule in axis.RULES if not rule.holds(setup))
        assert all(all(rule.says(setup)) for rule in broken)
