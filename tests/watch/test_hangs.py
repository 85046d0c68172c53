"""Real runs that hang: the doctor names rank, step and phase, and the job starts again or ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fivefold.problems import BadInput
from fivefold.training.metrics import read_metrics
from fivefold.watch.beat import read_beats
from fivefold.watch.doctor import REPORT, examine
from tests.training.test_stopping import LONG, command, reach
from tests.watch.planted import RANK, STEP

WITHIN_S = 30
"""The doctor has so long."""
JOB = """
[model]
preset = "tiny"
layers = 2
dim = 32
heads = 4
kv_heads = 2
ffn = 64
[training]
seq_len = 32
global_batch = 8
steps = 9
[data]
source = "random"
[layout]
zero = 0
[run]
tensorboard = false
[checkpoint]
every = 2
[resilience]
stall_s = 3.0
restarts = 1
"""


def planted(folder: Path, kind: str, ranks: int, *settings: str, **environ: str) -> subprocess.Popen[str]:
    file = folder / "given.toml"
    file.write_text(JOB)
    (folder / "planted").write_text(kind)
    words = [sys.executable, "-m", "tests.watch.planted", str(file), str(ranks)]
    return subprocess.Popen(
        [*words, f"--run.folder={folder}", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environ},
    )


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / REPORT).read_text())
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "ranks", "settings", "phase", "words"),
    [
        ("sleep", 2, [], "data loading", ["it is in data loading at planted.py", "in sleepy"]),
        pytest.param(
            "loop",
            2,
            [],
            "forward and backward",
            ["it is in forward and backward", "in spin"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "skip",
            4,
            ["--layout.tp=2"],
            "loss and norm",
            ["never entered all-reduce #6 (dp_replicate) of step 6: it left it out"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_hang_is_named_and_the_run_starts_again(
    tmp_path: Path, kind: str, ranks: int, settings: list[str], phase: str, words: list[str]
) -> None:
    run = planted(tmp_path, kind, ranks, *settings)
    told = run.communicate(timeout=200)[0]
    assert run.returncode == 0, told
    found = report(tmp_path)
    assert (found["ranks"], found["step"], found["phase"]) == ([RANK], STEP, phase), told
    assert found["waiting_s"] < WITHIN_S
    for text in (f"rank {RANK} never entered", f"of step {STEP}", "waits" if ranks == 2 else "wait", *words):
        assert text in found["sentence"], found["sentence"]
        assert text in told
    assert "Starting again from step 4" in told
    assert "ended at step 9" in told
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, 10))
    assert examine(tmp_path).diagnosis.ok


@pytest.mark.slow
def test_a_rank_that_is_slow_is_named_and_not_those_that_wait_for_it(tmp_path: Path) -> None:
    run = planted(tmp_path, "slow", 2, "--training.steps=40")
    told = run.communicate(timeout=200)[0]
    assert run.returncode == 0, told
    lines = examine(tmp_path).lines
    assert [line.partition(":")[0] for line in lines[1:]] == [f"rank {RANK} is slow"], lines


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_stopped_process_is_named_by_the_doctor_and_the_run_ends(tmp_path: Path) -> None:
    few = ("--resilience.stall_s", "8", "--resilience.restarts", "0")
    run = subprocess.Popen(
        command(tmp_path, 2, LONG, *few), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    reach(tmp_path, 30, run)
    while len(beats := read_beats(tmp_path)) < 2 or min(beat.step for beat in beats) == 0:
        time.sleep(0.1)  # what a stopped process has written down last is all that is known of it
    assert examine(tmp_path).diagnosis.ok
    os.kill(beats[1].pid, signal.SIGSTOP)
    asked = time.monotonic()
    while (found := examine(tmp_path).diagnosis).ok or "never entered" not in found.sentence:
        assert time.monotonic() - asked < WITHIN_S, found
        time.sleep(0.2)
    assert found.ranks == (1,)
    assert f"its process {beats[1].pid} on {socket.gethostname()} is stopped" in found.sentence
    assert found.step == read_metrics(tmp_path)[-1]["step"] + 1
    doctor = [sys.executable, "-m", "fivefold", "doctor", str(tmp_path)]
    shown = subprocess.run([*doctor, "--json"], capture_output=True, text=True)
    assert shown.returncode == 1
    assert json.loads(shown.stdout)["ranks"] == [1]
    told = run.communicate(timeout=60)[0]
    assert run.returncode == 1
    assert "rank 1 failed: Stalled: rank 1 never entered" in told
    assert "Traceback" not in told
    assert "no process of this run is left" in examine(tmp_path).diagnosis.sentence


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_of_another_launcher_leave_when_they_hang_and_can_be_started_again(tmp_path: Path) -> None:
    first = launched(tmp_path, "sleep")
    told = [run.communicate(timeout=200)[0] for run in first]
    assert [run.returncode for run in first] == [1, 1], told
    assert "stalled: rank 1 never entered" in told[0]
    assert "it is in data loading" in told[0]
    assert "stalled" not in told[1]
    assert (report(tmp_path)["ranks"], report(tmp_path)["step"]) == ([RANK], STEP)
    second = launched(tmp_path, "")
    told = [run.communicate(timeout=200)[0] for run in second]
    assert [run.returncode for run in second] == [0, 0], told
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, 10))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    (run,) = launched(tmp_path, "", 1, "--resilience.join_s=2")
    told = run.communicate(timeout=100)[0]
    assert run.returncode == 1
    assert "rank 1 of 2 did not come to 127.0.0.1:" in told
    assert "within 2 s (resilience.join_s)" in told


def launched(folder: Path, kind: str, started: int = 2, *settings: str) -> list[subprocess.Popen[str]]:
    """The first ranks of two, as torchrun starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        planted(folder, kind, 0, *settings, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank in range(started)
    ]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder, reason in ((tmp_path, "is not the folder of a run"), (tmp_path / "no", "is not a folder")):
        with pytest.raises(BadInput, match=reason):
            examine(folder)
