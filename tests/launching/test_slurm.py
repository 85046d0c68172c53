"""The script for sbatch, with stand-ins for Slurm's commands: what it asks for, when it is queued again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fivefold.config import load
from fivefold.launching.gpus import Gpus
from fivefold.launching.machines import Launch
from fivefold.launching.slurm import DIRECTIVES, read_directives, script
from fivefold.problems import BadInput

STANDINS = {
    "srun": 'echo "srun $*" >> said; until [ -z "$WAITS" ] || [ -e asked ]; do sleep 0.05; done; exit $ENDS',
    "scancel": 'echo "scancel $*" >> said; touch asked',
    "scontrol": 'echo "scontrol $*" >> said',
}
JOB = load(None, "tiny", ["--run.folder=/shared/runs/big one"])
LAUNCH = Launch(JOB, 4, 8, ["job.toml", "--run.folder=/shared/runs/big one"], env={"A": "x y"}, grace_s=90)
TEXT = script(
    LAUNCH, Gpus(8, "h100"), 20, "/shared", "export B=2", read_directives(["partition=gpu", "exclusive"])
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for name, body in {**STANDINS, "script": TEXT}.items():
        (tmp_path / name).write_text(body if name == "script" else f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path / "script"


def start(path: Path, **settings: str) -> subprocess.Popen[bytes]:
    shown = {**os.environ, "PATH": f"{path.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "WAITS": ""}
    return subprocess.Popen([path], cwd=path.parent, env=shown | settings)


def directives(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", text, flags=re.MULTILINE))


def test_it_asks_sbatch_for_the_machines_time_to_save_and_another_turn():
    assert directives(TEXT) == {
        "job-name": "big-one",
        "nodes": "4",
        "ntasks-per-node": "8",
        "gpus-per-node": "h100:8",
        "chdir": "/shared",
        "requeue": "",
        "open-mode": "append",
        "signal": "B:USR1@90",
        "partition": "gpu",
        "exclusive": "",
    }
    assert directives(TEXT).keys() <= DIRECTIVES
    head, _, body = TEXT.partition("\n\n")
    assert all(
        line.startswith("#") for line in head.splitlines()
    )  # sbatch stops reading at the first command
    assert "#SBATCH" not in body


def test_bash_takes_it(path):
    assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""


def test_without_gpus_none_are_asked_for():
    assert "gpus-per-node" not in script(LAUNCH, Gpus(0), 20)


def test_what_the_user_asks_of_sbatch_goes_over_ours():
    assert directives(script(LAUNCH, Gpus(8), 20, more={"nodes": "3-4"}))["nodes"] == "3-4"


@pytest.mark.parametrize(
    ("word", "said"),
    [("partiton=gpu", "Did you mean 'partition'?"), ("comment=a b", "without blanks or quotes")],
)
def test_a_directive_that_sbatch_would_not_take(word, said):
    with pytest.raises(BadInput, match=re.escape(said)):
        read_directives([word])


@pytest.mark.parametrize(
    ("code", "count", "requeued"),
    [("0", "0", False), ("1", "0", True), ("137", "3", True), ("2", "0", False), ("1", "20", False)],
)
def test_a_job_that_failed_goes_back_to_the_queue(path, code, count, requeued):
    assert start(path, ENDS=code, SLURM_RESTART_COUNT=count).wait(60) == int(code)
    said = (path.parent / "said").read_text()
    expected = (
        "srun --kill-on-bad-exit=1 python -m fivefold train job.toml --run.folder=/shared/runs/big one\n"
    )
    assert said.startswith(expected)
    assert ("scontrol requeue 7" in said) == requeued


def test_a_job_that_is_out_of_time_saves_and_goes_back_to_the_queue(path):
    job = start(path, ENDS="0", WAITS="yes", SLURM_RESTART_COUNT="99")
    while not (path.parent / "said").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 0
    assert (path.parent / "said").read_text().splitlines()[1:] == [
        "scancel --signal=USR1 7.0",
        "scontrol requeue 7",
    ]
