"""Plans from keyword arguments."""

from __future__ import annotations

from inspect import signature
from typing import Any, assert_type

import pytest

import fivefold
from fivefold.commands import plan as commands
from tests.api.refused import refused


@pytest.fixture(scope="module")
def plan() -> fivefold.Plan:
    return fivefold.plan("llama3-8b", gpus=8, global_batch=32, tokens=1e9, price=2)


def test_a_plan_prints_as_a_short_table(plan: fivefold.Plan) -> None:
    assert_type(plan, fivefold.Plan)
    assert repr(plan) == str(plan) == plan.table
    first, header, best, *_ = plan.table.splitlines()
    assert first == "llama3-8b on 8 x H100 SXM (dgx-h100), 32 sequences of 8,192 tokens, bf16"
    assert header.split() == ["layout", "step", "tok/s/GPU", "MFU", "GiB", "days", "cost"]
    assert plan.best is not None
    assert f"{plan.best.step_time:.4g} s" in best
    assert len(plan.table.splitlines()) <= 20
    assert max(len(repr(part)) for part in (plan, plan.best, plan.searched, plan.request.cluster)) < 2500
    assert len(repr(plan.best)) < 200
    assert len(repr(plan.searched)) < 250


def test_a_plan_is_what_the_command_prints(plan: fivefold.Plan) -> None:
    told = plan.as_json()
    row = told["best"][0]
    assert (plan.mfu, plan.days, plan.cost) == (row["mfu"], row["days"], row["cost"])
    assert (plan.gpus, told["gpus"]) == (8, 8)


def test_numbers_may_be_given_as_the_command_line_has_them() -> None:
    numbers = fivefold.plan("tiny", cluster="laptop", gpus=1, tokens=1e9, price=2).as_json()
    words = fivefold.plan(model="tiny", cluster="laptop", gpus="1", tokens="1B", price=2.0).as_json()
    assert {**words, "seconds": 0} == {**numbers, "seconds": 0}
    assert numbers["best"][0]["cost"] > 0


def test_what_is_left_out_is_what_the_command_leaves_out() -> None:
    """Both doors ask the same question where a user says nothing."""
    command, function = signature(commands.plan).parameters, signature(fivefold.plan).parameters
    names = {"compiled": "compile"}
    shared = {names.get(name, name): each.default for name, each in command.items()}
    shared |= {"gpus": int(shared["gpus"])}
    both = shared.keys() & function.keys()
    assert both >= {"model", "hf", "cluster", "gpus", "seq_len", "tokens", "precision", "compile"}
    assert {name: function[name].default for name in both} == {name: shared[name] for name in both}


def test_a_plan_takes_keys_by_section_and_by_name() -> None:
    here: dict[str, Any] = {"cluster": "laptop", "gpus": 2}
    by_section = fivefold.plan("tiny", **here, layout={"tp": 2}, training={"micro_batch": 2})
    by_name = fivefold.plan("tiny", {"layout.tp": 2, "training.micro_batch": 2}, **here)
    assert by_section.request.fixed == by_name.request.fixed == {"tp": 2, "micro_batch": 2}
    assert by_section.best is not None
    assert by_section.best.keys == by_name.best.keys if by_name.best else False
    assert (by_section.job().layout.tp, by_section.job().training.micro_batch) == (2, 2)
    assert "why: tp=4, but layout.tp fixes it" in refused(by_section.why, tp=4)


def test_why_takes_keywords_and_prints_as_its_sentence(plan: fivefold.Plan) -> None:
    reason = plan.why(tp=8)
    assert reason.verdict == "slower"
    assert repr(reason).splitlines()[0] == reason.sentence
    assert "Did you mean 'tp'?" in refused(plan.why, tpp=8)
    assert refused(plan.why, tp="8").startswith("why: tp: '8' is text")
    assert "dp_shard" in refused(plan.why, dp=8)


def test_a_plans_job_trains_as_the_best_layout_says(plan: fivefold.Plan) -> None:
    assert plan.best is not None
    job = plan.job()
    assert_type(job, fivefold.Job)
    row = plan.as_json()["best"][0]
    assert row["layout"].items() <= job.layout.model_dump().items()
    assert row["training"].items() <= job.training.model_dump().items()
    assert job.training.steps == round(1e9 / (32 * 8192))
    other = plan.job({"training.steps": 7}, optimizer={"lr": 1e-4})
    assert (other.training.steps, other.optimizer.lr, other.layout) == (7, 1e-4, job.layout)
    assert "Did you mean 'steps'?" in refused(plan.job, training={"stpes": 7})


def test_where_nothing_fits_the_plan_says_what_would() -> None:
    none = fivefold.plan("llama3-8b", gpus=1)
    assert none.best is None
    assert none.days is none.cost is none.mfu is None
    assert "No layout fits" in repr(none)
    assert "With gpus=" in none.nearest()
    with pytest.raises(fivefold.BadNews, match="No layout fits"):
        none.job()


def test_what_is_too_late_is_said() -> None:
    late = fivefold.plan("tiny", cluster="laptop", gpus=1, tokens=1e12, deadline=1)
    assert late.late is not None
    assert 'gpus="auto"' in late.late
    assert late.table.endswith(late.late)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "llama3-8"}, "model: 'llama3-8' is not known\n    Did you mean 'llama3-8b'?"),
        ({}, "model: not given, nor hf"),
        ({"model": "tiny", "gpus": 0}, "gpus: 0 is out of range"),
        ({"model": "tiny", "gpus": "auto"}, "gpus: 'auto' needs tokens and deadline"),
        ({"model": "tiny", "seq_len": "8k"}, "seq_len: '8k' is text\n    Allowed: an integer, at least 1."),
        ({"model": "tiny", "global_batch": 1.5}, "global_batch: 1.5 is a decimal number"),
        ({"model": "tiny", "price": "cheap"}, "price: 'cheap' is out of range"),
        ({"model": "tiny", "deadline": 3}, "deadline: is given without tokens"),
        ({"model": "tiny", "tokens": "lots"}, "tokens: 'lots' is not a quantity"),
        ({"model": "tiny", "tokens": -1e9}, "tokens: '-1000000000.0' is not a quantity"),
        ({"model": "tiny", "precision": "bf61"}, "precision: 'bf61' is not known\n    Did you mean 'bf16'?"),
        ({"model": "tiny", "compile": "yes"}, "compile: 'yes' is text\n    Allowed: true or false."),
        ({"model": "tiny", "layout": {"tp": "8"}}, "layout.tp: '8' is text"),
        ({"model": "tiny", "overrides": 8}, "overrides: 8 is a int"),
        ({"model": "tiny", "data": {"source": "x"}}, "data.source: 'x': a plan does not depend on it"),
        (
            {"model": "tiny", "seq_len": 64, "training": {"seq_len": 64}},
            "seq_len: given together with training.seq_len",
        ),
        ({"model": "tiny", "cluster": "dgx-h10"}, "Did you mean 'dgx-h100'?"),
    ],
)
def test_bad_arguments_are_refused_by_their_names(given: dict[str, Any], said: str) -> None:
    text = refused(fivefold.plan, **given)
    assert said in text
    assert "--" not in text
