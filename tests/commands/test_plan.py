"""`fivefold plan`: what it answers, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.config import load
from tests.commands.typed import typed

TINY = ["plan", "--model", "tiny", "--cluster", "laptop", "--gpus", "2"]


def test_plan_answers_in_json_with_the_promised_keys(tmp_path: Path) -> None:
    job_file = tmp_path / "job.toml"
    more = ["--tokens", "1B", "--price", "2", "--why", "tp=2", "--out", str(job_file), "--json"]
    done = typed("plan", "--model", "tiny", "--gpus", "2", "--global-batch", "32", *more)
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert {"best", "searched", "played", "seconds", "pareto"} <= told.keys()
    best = told["best"][0]
    keys = {"layout", "step_time_s", "breakdown", "tokens_per_s_per_gpu", "mfu", "memory_gib", "days", "cost"}
    assert keys <= best.keys()
    assert 0 < best["mfu"] < 1
    assert best["cost"] == pytest.approx(best["days"] * 24 * 2 * 2)
    assert {"sentence", "remedies", "verdict"} <= told["why"].keys()
    written = load(str(job_file))
    assert best["layout"].items() <= written.layout.model_dump().items()


def test_plan_without_tokens_has_no_days() -> None:
    best = json.loads(typed(*TINY, "--json").stdout)["best"][0]
    assert best["days"] is best["cost"] is None


def test_plan_for_people_shows_a_table_where_the_time_goes_and_a_recipe() -> None:
    shown = typed(*TINY, "--recipe")
    assert shown.exit_code == 0
    for words in ("fastest", "the usual recipe", "MFU: model FLOPs with causal attention"):
        assert words in shown.stdout
    lines = shown.stdout.splitlines()
    (spent,) = [line for line in lines if "the fastest spends" in line]
    assert "compute" in spent
    assert lines.index(spent) < lines.index("less memory, at what price (Pareto front)")


def test_plan_that_cannot_be_is_bad_news_with_a_way_out(tmp_path: Path) -> None:
    out = tmp_path / "job.toml"
    done = typed("plan", "--model", "llama3-8b", "--gpus", "1", "--out", str(out), "--json")
    assert done.exit_code == 1
    nearest = json.loads(done.stdout)["nearest"]
    assert "GiB" in nearest["sentence"]
    assert nearest["remedies"]
    assert not out.exists()


def test_plan_that_misses_the_deadline_is_bad_news() -> None:
    late = [*TINY, "--tokens", "1T", "--deadline", "1", "--json"]
    done = typed(*late)
    assert done.exit_code == 1
    assert "days" in json.loads(done.stdout)["late"]


def test_what_a_config_does_not_get_is_said_beside_the_json(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_positions": 32, "resid_pdrop": 0.1}))
    words = ["--hf", str(tmp_path), "--seq-len", "32", "--cluster", "laptop", "--gpus", "1", "--json"]
    done = typed("plan", *words)
    assert done.exit_code == 0, done.stderr
    assert "resid_pdrop = 0.1" in done.stderr
    assert json.loads(done.stdout)["best"]


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
