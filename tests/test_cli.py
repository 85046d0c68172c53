"""The command line, run as users run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fivefold.config import load
from fivefold.training.metrics import read_metrics

FIVEFOLD = [sys.executable, "-m", "fivefold.cli"]
SMALL = [
    *("--preset", "tiny", "--model.layers", "2", "--model.dim", "32", "--model.ffn", "32"),
    *("--data.source", "random", "--training.seq_len", "16", "--training.global_batch", "4"),
    *("--run.tensorboard", "false"),
]
PROMISED = {
    *("step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "tokens_per_s_per_device"),
    *("mfu", "hfu", "memory_gib", "attempt"),
}


def fivefold(*words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FIVEFOLD, *words], capture_output=True, text=True, timeout=200, **options)


# --- answers at once ---------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy():
    script = """
import sys
from fivefold.cli import app
app(sys.argv[1:], standalone_mode=False)
print({"torch", "numpy", "pyarrow", "transformers", "tokenizers"} & set(sys.modules))
"""
    verbs = ("train", "plan", "simulate", "probe", "scaling", "backtest")
    for words in (["--help"], *([verb, "--help"] for verb in verbs), ["models"], ["keys"]):
        command = [sys.executable, "-c", script, *words]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert printed.splitlines()[-1] == "set()", words


def test_help_names_the_verbs_and_shows_examples():
    page = fivefold("--help")
    assert page.returncode == 0
    assert all(f"  {verb} " in page.stdout for verb in ("plan", "train", "verify", "models", "keys"))
    assert "fivefold train --preset tiny --nproc 4" in fivefold("train", "--help").stdout


def test_version():
    assert fivefold("--version").stdout == "0.1.0\n"


def test_models_have_exact_counts():
    listed = json.loads(fivefold("models", "--json").stdout)
    assert listed["gpt2"]["parameters"] == 124_439_808
    assert "405,853,388,800" in fivefold("models").stdout


def test_keys_are_listed_with_what_they_allow():
    listed = json.loads(fivefold("keys", "--json").stdout)
    assert listed["training.steps"]["default"] == 200
    assert listed["layout.zero"]["allowed"] == "an integer, at least 0 and at most 3"
    assert "model.layers" in listed
    one = fivefold("keys", "optimizer").stdout
    assert "optimizer.betas" in one
    assert "training.steps" not in one


# --- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --trainning.steps 3", "Did you mean 'training'?"),
        ("train --training.stps=3", "training.stps: there is no such key\n    Did you mean 'steps'?"),
        (
            "verify --layout.zero 4",
            "layout.zero: 4 is out of range\n    Allowed: an integer, at least 0 and at most 3.",
        ),
        ("train --nprocs 4", "Did you mean '--nproc'?"),
        ("train --steps 4", "Did you mean '--training.steps'?"),
        ("train --nproc 0", "--nproc: 0 is out of range"),
        ("train nowhere.toml", "nowhere.toml: there is no such file"),
        ("train one.toml two.toml", "two.toml: is a second job file"),
        ("train --preset tinny", "Did you mean 'tiny'?"),
        ("keys trainin", "Did you mean 'training'?"),
        ("trian", "trian"),
    ],
)
def test_bad_input_exits_2_and_says_what_is_meant(words, said):
    ended = fivefold(*words.split())
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr


def test_what_only_a_resolved_job_shows_exits_2_before_any_rank_starts(tmp_path):
    ended = fivefold("train", *SMALL, "--nproc", "3", "--json", cwd=tmp_path)
    assert ended.returncode == 2
    assert json.loads(ended.stdout)["problems"][0]["key"] == "training.global_batch"
    assert "3 or 6" in ended.stderr
    assert list(tmp_path.iterdir()) == []


# --- training ----------------------------------------------------------------------------------------------


def test_train_writes_what_it_promises_and_continues(tmp_path):
    job_file = tmp_path / "job.toml"
    job_file.write_text("[training]\nsteps = 2\nvalidate_every = 2\nvalidate_batches = 1\n")
    run = tmp_path / "run"
    words = [str(job_file), *SMALL, "--nproc", "2", "--run", str(run), "--json"]
    first = fivefold("train", *words)
    assert first.returncode == 0, first.stderr
    summary = json.loads(first.stdout)
    assert (summary["steps"], summary["folder"]) == (2, str(run))
    resolved = load(str(run / "job.toml"))
    assert (resolved.layout.dp_shard, resolved.layout.zero, resolved.training.micro_batch) == (2, 3, 2)

    second = fivefold("train", *words, "--training.steps", "3")
    assert second.returncode == 0, second.stderr
    lines = read_metrics(run)
    assert [(line["step"], line["attempt"]) for line in lines] == [(1, 1), (2, 1), (3, 2)]
    assert all(line.keys() >= PROMISED for line in lines)
    assert lines[1]["val_loss"] > 0
    assert lines[2]["tokens"] == 3 * 4 * 16


def descendants(process: int) -> list[int]:
    """The processes below one, at any depth."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents.setdefault(int(parent), []).append(int(stat.parent.name))
    found = list(parents.get(process, []))
    for child in found:
        found.extend(parents.get(child, []))
    return found


def until(condition, seconds: float = 120.0):
    """What `condition` gives once it holds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return value


@pytest.mark.parametrize("how", ["ctrl-c", "a rank is killed"])
def test_a_run_that_is_cut_short_leaves_no_process(tmp_path, how):
    run = tmp_path / "run"
    words = ["train", *SMALL, "--nproc", "2", "--run", str(run), "--training.steps", "1000000"]
    words += ["--resilience.restarts", "0"]
    # A session of its own, so that the signal reaches its processes as Ctrl-C in a terminal would.
    # Jobs that a script starts in the background ignore Ctrl-C, and so would what they start.
    starter = subprocess.Popen(
        [*FIVEFOLD, *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        until(lambda: read_metrics(run))
        below = descendants(starter.pid)
        if how == "ctrl-c":
            os.killpg(starter.pid, signal.SIGINT)
        else:
            (server,) = [process for process in below if len(descendants(process)) == 2]
            victim = max(descendants(server))
            os.kill(victim, signal.SIGKILL)
        _, said = starter.communicate(timeout=60)
        if how == "ctrl-c":
            assert starter.returncode == 0
            assert "It was asked to stop. To go on: fivefold train" in said
            assert "Traceback" not in said
        else:
            assert starter.returncode == 1
            error = said[said.index("rank ") :]
            assert error.startswith("rank 1 failed: Killed: the process was ended by SIGKILL")
            assert "SIGKILL" in (run / "errors" / "rank-1.json").read_text()
        until(lambda: not any(Path(f"/proc/{process}").exists() for process in below), 30)
    finally:
        if starter.poll() is None:
            os.killpg(starter.pid, signal.SIGKILL)


@pytest.mark.slow
def test_train_joins_the_ranks_of_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "fivefold.cli", "train", *SMALL, "--training.steps", "2", "--json"]
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert [line["step"] for line in read_metrics(Path(summary["folder"]))] == [1, 2]
    assert load(summary["folder"] + "/job.toml").layout.dp_shard == 2
    refused = subprocess.run(
        [*torchrun, *words, "--training.global_batch", "3"], capture_output=True, text=True
    )
    assert refused.stderr.count("does not split evenly") == 1


# --- planning ----------------------------------------------------------------------------------------------

PLAN = ["plan", "--model", "llama3-8b", "--gpus", "8", "--global-batch", "32"]


def test_plan_answers_in_json_with_the_promised_keys(tmp_path: Path) -> None:
    job_file = tmp_path / "job.toml"
    more = ["--tokens", "1B", "--price", "2", "--why", "tp=8", "--out", str(job_file), "--json"]
    done = fivefold(*PLAN, *more)
    assert done.returncode == 0, done.stderr
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
    best = json.loads(fivefold(*PLAN, "--json").stdout)["best"][0]
    assert best["days"] is best["cost"] is None


def test_plan_for_people_shows_a_table_and_a_recipe() -> None:
    shown = fivefold(*PLAN, "--recipe")
    assert shown.returncode == 0
    for words in ("fastest", "Pareto front", "the usual recipe", "MFU: model FLOPs with causal attention"):
        assert words in shown.stdout


def test_plan_that_cannot_be_is_bad_news_with_a_way_out() -> None:
    done = fivefold("plan", "--model", "llama3-405b", "--gpus", "8", "--json")
    assert done.returncode == 1
    nearest = json.loads(done.stdout)["nearest"]
    assert "GiB" in nearest["sentence"]
    assert nearest["remedies"]


TINY = ["plan", "--model", "tiny", "--cluster", "laptop", "--gpus", "4"]


def test_plan_takes_the_keys_of_a_job(tmp_path: Path) -> None:
    job_file = tmp_path / "job.toml"
    keys = ["--layout.tp", "2", "--training.recompute=full", "--optimizer.lr", "0.5"]
    done = fivefold(*TINY, *keys, "--out", str(job_file), "--json")
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["best"]
    assert {row["layout"]["tp"] for row in best} == {2}
    assert {row["training"]["recompute"] for row in best} == {"full"}
    job = load(str(job_file))
    assert (job.layout.tp, job.training.recompute, job.optimizer.lr) == (2, "full", 0.5)


def test_plan_says_where_the_time_goes() -> None:
    lines = fivefold(*TINY).stdout.splitlines()
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
    done = fivefold(*TINY, *words.split())
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_plan_of_what_nobody_knows_is_bad_input() -> None:
    done = fivefold("plan", "--model", "lama3-8b", "--cluster", "dgx-h10", "--gpus", "0", "--json")
    assert done.returncode == 2
    assert [problem["key"] for problem in json.loads(done.stdout)["problems"]] == [
        "--model",
        "cluster",
        "--gpus",
    ]
