"""`fivefold plan`: what it answers, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.config import load
from tests.commands.typed import typed

PLAN = ["plan", "--model", "llama3-8b", "--gpus", "8", "--global-batch", "32"]


def test_plan_answers_in_json_with_the_promised_keys(tmp_path: Path) -> None:
    job_file = tmp_path / "job.toml"
    more = ["--tokens", "1B", "--price", "2", "--why", "tp=8", "--out", str(job_file), "--json"]
    done = typed(*PLAN, *more)
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert {"best", "searched", "played", "seconds", "pareto"} <= told.keys()
    best = told["best"][0]
    keys = {"layout", "step_time_s", "breakdown", "tokens_per_s_per_gpu", "mfu", "memory_gib", "days", "cost"}
    assert keys <= best.keys()
    assert 0 < best["mfu"] < 1
    assert told["why"]["sentence"]
    written = load(str(job_file))
    assert best["layout"].items() <= written.layout.model_dump().items()


def test_plan_without_tokens_has_no_days() -> None:
    best = json.loads(typed(*PLAN, "--json").stdout)["best"][0]
    assert best["days"] is best["cost"] is None


def test_plan_for_people_shows_a_table_and_a_recipe() -> None:
    shown = typed(*PLAN, "--recipe")
    assert shown.exit_code == 0
    for words in ("fastest", "Pareto front", "the usual recipe", "MFU: model FLOPs with causal attention"):
        assert words in shown.stdout


def test_plan_that_cannot_be_is_bad_news_with_a_way_out() -> None:
    done = typed("plan", "--model", "llama3-405b", "--gpus", "8", "--json")
    assert done.exit_code == 1
    nearest = json.loads(done.stdout)["nearest"]
    assert "GiB" in nearest["sentence"]
    assert nearest["remedies"]


TINY = ["plan", "--model", "tiny", "--cluster", "laptop", "--gpus", "4"]


def test_plan_takes_the_keys_of_a_job(tmp_path: Path) -> None:
    job_file = tmp_path / "job.toml"
    keys = ["--layout.tp", "2", "--training.recompute=full", "--optimizer.lr", "0.5"]
    done = typed(*TINY, *keys, "--out", str(job_file), "--json")
    assert done.exit_code == 0, done.stderr
    best = json.loads(done.stdout)["best"]
    assert {row["layout"]["tp"] for row in best} == {2}
    assert {row["training"]["recompute"] for row in best} == {"full"}
    job = load(str(job_file))
    assert (job.layout.tp, job.training.recompute, job.optimizer.lr) == (2, "full", 0.5)


def test_plan_says_where_the_time_goes() -> None:
    lines = typed(*TINY).stdout.splitlines()
    (spent,) = [line for line in lines if "the fastest spends" in line]
    assert "compute" in spent
    assert lines.index(spent) < lines.index("less memory, at what price (Pareto front)")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data.source random", "data.source: 'random': a plan does not depend on it\n    Allowed: model.*"),
        ("--seq-len 64 --training.seq_len 64", "--seq-len: given together with --training.seq_len"),
        ("--no-compile --training.compile true", "--compile: given together with --training.compile"),
        ("--layout.tp 3", "layout.tp: 3 ranks cannot share model.heads"),
        ("--layout.tp", "--layout.tp: has no value"),
        ("--tp 2", "Did you mean '--layout.tp'?"),
        ("--gpu 2", "Did you mean '--gpus'?"),
        ("job.toml", "job.toml: is not a setting"),
        ("--layout.tp 2 --recipe", "--recipe: its rules choose tp themselves"),
    ],
)
def test_plan_refuses_keys_in_words(words: str, said: str) -> None:
    done = typed(*TINY, *words.split())
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_plan_of_what_nobody_knows_is_bad_input() -> None:
    done = typed("plan", "--model", "lama3-8b", "--cluster", "dgx-h10", "--gpus", "0", "--json")
    assert done.exit_code == 2
    assert [problem["key"] for problem in json.loads(done.stdout)["problems"]] == [
        "--model",
        "cluster",
        "--gpus",
    ]
