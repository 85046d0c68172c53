"""Runs that are asked to stop while they train, or lose a rank. What is killed where: `tests/soak`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fivefold.config import load
from fivefold.storage.folder import saved_steps
from fivefold.training.failures import RanksFailed
from fivefold.training.launch import train
from fivefold.training.metrics import read_metrics
from tests.soak.moments import ranks_of

SMALL = (
    *("--preset", "tiny", "--model.layers", "2", "--model.dim", "32", "--model.heads", "4"),
    *("--model.kv_heads", "2", "--model.ffn", "64", "--training.seq_len", "32"),
    *("--training.global_batch", "8", "--data.source", "random", "--run.tensorboard", "false"),
)
LONG = 1_000_000


def command(folder: Path, ranks: int, steps: int, *more: str) -> list[str]:
    words = ("--nproc", str(ranks), "--run", str(folder), "--training.steps", str(steps))
    return [sys.executable, "-m", "fivefold", "train", *SMALL, *words, *more]


def started(folder: Path, ranks: int, steps: int, *more: str) -> subprocess.Popen[str]:
    """A run that has taken some steps."""
    run = subprocess.Popen(
        command(folder, ranks, steps, *more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    reach(folder, 3, run)
    return run


def reach(folder: Path, step: int, run: subprocess.Popen[str]) -> None:
    while not (records := read_metrics(folder)) or records[-1]["step"] < step:
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        (2, signal.SIGTERM),
        pytest.param(1, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(
    tmp_path: Path, ranks: int, number: signal.Signals
) -> None:
    run = started(tmp_path, ranks, LONG)
    run.send_signal(number)
    told = run.communicate(timeout=60)[0]
    assert run.returncode == 0, told
    assert "To go on: fivefold train" in told
    (step,) = saved_steps(tmp_path)
    assert step == read_metrics(tmp_path)[-1]["step"]
    more = ["--training.steps", str(step + 2), "--optimizer.schedule", "constant"]
    train(load(f"{tmp_path}/job.toml", overrides=more), nproc=ranks)
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, step + 3))


@pytest.mark.slow  # the fast one that signals all processes is `test_a_signal_at_any_moment`
@pytest.mark.timeout(240)
def test_all_processes_of_a_job_may_be_signalled_at_once(tmp_path: Path) -> None:
    """As a scheduler does; it is one request."""
    run = started(tmp_path, 2, LONG)
    for pid in [*ranks_of(run.pid), run.pid]:
        os.kill(pid, signal.SIGTERM)
    told = run.communicate(timeout=60)[0]
    assert run.returncode == 0, told
    assert len(saved_steps(tmp_path)) == 1


def test_without_restarts_a_killed_rank_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model.module", "tests.training.test_elastic:Fragile", "--data.source", "random"]
    words += ["--training.global_batch", "6", "--training.seq_len", "16", "--resilience.restarts", "0"]
    with pytest.raises(RanksFailed, match=r"rank 1 failed: .*SIGKILL"):
        train(load(overrides=words), nproc=3, run=tmp_path)
    assert "Starting again" not in capsys.readouterr().err
