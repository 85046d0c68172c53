"""The Slurm script of docs/hosts.md, with stand-ins for Slurm's commands: when the job is queued again."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
STANDINS = {
    "srun": 'echo "srun $*" >> said; until [ -z "$WAITS" ] || [ -e asked ]; do sleep 0.05; done; exit $ENDS',
    "scancel": 'echo "scancel $*" >> said; touch asked',
    "scontrol": 'echo "scontrol $*" >> said',
}


@pytest.fixture
def script(tmp_path):
    [text] = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", PAGE.read_text(), flags=re.DOTALL)
    for name, body in {**STANDINS, "script": text}.items():
        (tmp_path / name).write_text(body if name == "script" else f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path / "script"


def start(script, **settings):
    shown = {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "WAITS": ""}
    return subprocess.Popen([script], cwd=script.parent, env=shown | settings)


@pytest.mark.parametrize(
    ("code", "count", "requeued"),
    [("0", "0", False), ("1", "0", True), ("137", "3", True), ("2", "0", False), ("1", "20", False)],
)
def test_a_job_that_failed_goes_back_to_the_queue(script, code, count, requeued):
    assert start(script, ENDS=code, SLURM_RESTART_COUNT=count).wait(60) == int(code)
    said = (script.parent / "said").read_text()
    assert "srun --kill-on-bad-exit=1 fivefold train job.toml" in said
    assert ("scontrol requeue 7" in said) == requeued


def test_a_job_that_is_out_of_time_saves_and_goes_back_to_the_queue(script):
    job = start(script, ENDS="0", WAITS="yes", SLURM_RESTART_COUNT="99")
    while not (script.parent / "said").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 0
    assert (script.parent / "said").read_text().splitlines()[1:] == [
        "scancel --signal=USR1 7.0",
        "scontrol requeue 7",
    ]
