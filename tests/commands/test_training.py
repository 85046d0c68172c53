"""`fivefold train`, run as users run it."""

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
from tests.commands.typed import SMALL, typed

FIVEFOLD = [sys.executable, "-m", "fivefold.cli"]
PROMISED = {
    *("step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "tokens_per_s_per_device"),
    *("mfu", "hfu", "memory_gib", "attempt"),
}


def fivefold(*words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FIVEFOLD, *words], capture_output=True, text=True, timeout=200, **options)


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

    second = typed("train", *words, "--training.steps", "3")
    assert second.exit_code == 0, second.stderr
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


@pytest.mark.parametrize("how", ["ctrl-c", pytest.param("a rank is killed", marks=pytest.mark.slow)])
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
