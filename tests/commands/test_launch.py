"""`fivefold launch`, as it is typed: bad input, files, and commands that are only printed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from tests.commands.typed import typed
from tests.launching.like_ssh import make_ssh

TINY = ("launch", "--preset", "tiny")
ON_CLAIM = ("--image", "i", "--storage", "claim")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "--hosts: no platform is named\n    Give one of --hosts, --slurm, --kubernetes, --skypilot."),
        ("--hosts a,b --slurm f", "--slurm: given together with --hosts"),
        ("--hosts= --nproc-per-node 2", "--hosts: '' names no host"),
        ("--hosts a,b,a --nproc-per-node 2", "--hosts: a is named twice"),
        ("--hosts a,b", "--nproc-per-node: is not given, and the job's layout says nothing of ranks"),
        ("--hosts a,b --nproc-per-node 0", "--nproc-per-node: 0 is out of range"),
        (
            "--hosts a,b,c --nproc-per-node 1",
            "does not split evenly over 3 data ranks (3 machines x 1 ranks)",
        ),
        (
            "--hosts a,b --nproc-per-node 2 --layout.tp 3",
            "makes 3, but there are 4 ranks (2 machines x 2 ranks)",
        ),
        ("--hosts a,b --nproc-per-node 2 --ssh no-such-ssh", "--ssh: there is no program 'no-such-ssh' here"),
        ("--hosts a,b --nproc-per-node 2 --ssh 'x", "--ssh: ''x' cannot be split into words"),
        ("--hosts a,b --nproc-per-node 2 --nodes 3", "--nodes: is of no use to --hosts"),
        ("--hosts a,b --nproc-per-node 2 --port 70000", "--port: 70000 is out of range"),
        ("--hosts a,b --nproc-per-node 2 --env 1=2", "--env: '1=2' is not a variable"),
        ("--hosts a,b --nproc-per-nod 2", "Did you mean '--nproc-per-node'?"),
        ("--slurm - --nodes 2 --nproc-per-node 2 --dry-run", "--dry-run: is of no use to --slurm"),
        ("--slurm - --nodes 2 --nproc-per-node 2 --image i", "It is for --kubernetes."),
        ("--slurm - --nodes 2 --nproc-per-node 4 --gpus 2", "--gpus: 2, but there are 4 ranks a machine"),
        ("--slurm - --nodes 2 --nproc-per-node 2 --sbatch tme=1", "Did you mean 'time'?"),
        ("--slurm no/such/folder/f --nodes 2 --nproc-per-node 2", "there is no folder no/such/folder"),
        ("--kubernetes - --nodes 2 --nproc-per-node 2 --storage c", "--image: is not given"),
        ("--kubernetes - --nodes 2 --nproc-per-node 2 --image i", "--storage: is not given"),
        ("--kubernetes - --nodes 2 --nproc-per-node 2 --image i --storage c --gpus H100:2", "names a kind"),
        ("--kubernetes - --nodes 2 --nproc-per-node 2 --image i --storage c --restarts 2", "--kind jobset"),
        (
            "--kubernetes - --nodes 2 --nproc-per-node 2 --image i --storage c --run /x",
            "is not on the storage",
        ),
        ("--skypilot - --nodes 2 --nproc-per-node 2 --storage v", "--gpus: SkyPilot must know which"),
    ],
)
def test_bad_input_exits_2_before_anything_starts(words, said):
    ended = typed(*TINY, *words.split())
    assert ended.exit_code == 2
    assert said in ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr


def test_a_file_that_exists_is_replaced_by_force_alone(tmp_path):
    file = tmp_path / "job.sbatch"
    words = (*TINY, "--slurm", str(file), "--nodes", "2", "--nproc-per-node", "2")
    ended = typed(*words)
    assert (ended.exit_code, ended.stdout) == (0, f"written. To start it: sbatch {file}\n")
    file.write_text("mine")
    ended = typed(*words)
    assert ended.exit_code == 2
    assert f"--slurm: '{file}' exists" in ended.stderr
    assert file.read_text() == "mine"
    assert typed(*words, "--force").exit_code == 0
    assert file.read_text().startswith("#!/bin/bash\n#SBATCH ")


def test_a_file_that_must_not_be_written_is_told(tmp_path):
    """As another user than root, who may write anything."""
    (tmp_path / "locked").mkdir(mode=0o555)
    words = ["--slurm", "locked/f", "--nodes", "2", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [sys.executable, "-m", "fivefold", *TINY, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        preexec_fn=_heed_permissions if os.geteuid() == 0 else None,
    )
    assert ended.returncode == 2
    assert "--slurm: 'locked/f' cannot be written" in ended.stderr


def _heed_permissions() -> None:
    """Root without the right to pass over permissions."""
    import ctypes

    cap_dac_override, pr_capbset_drop = 1, 24
    ctypes.CDLL(None).prctl(pr_capbset_drop, cap_dac_override)


@pytest.mark.parametrize(
    "words",
    [
        ("--slurm", "-"),
        ("--kubernetes", "-", *ON_CLAIM),
        ("--kubernetes", "-", "--kind", "jobset", *ON_CLAIM),
        ("--skypilot", "-", "--gpus", "0", "--storage", "volume"),
    ],
)
def test_a_dash_prints_the_file_alone(words):
    ended = typed(
        *TINY, *words, "--nodes", "2", "--nproc-per-node", "2", "--run", "big", "--training.steps", "7"
    )
    assert ended.exit_code == 0, ended.stderr
    assert ended.stderr == ""
    assert "training.steps=7" in ended.stdout
    assert "written" not in ended.stdout


def test_a_dry_run_prints_what_would_be_run_and_runs_nothing(tmp_path):
    ssh = make_ssh(tmp_path, "#!/bin/sh\ntouch ran\n")
    words = ("--hosts", "a,b", "--nproc-per-node", "2", "--ssh", f"{ssh} -v", "--folder", "/f", "--dry-run")
    ended = typed(*TINY, *words, "--training.steps", "7", "--run", "runs/x")
    assert ended.exit_code == 0, ended.stderr
    lines = [shlex.split(line) for line in ended.stdout.splitlines()]
    assert [line[:3] for line in lines] == [[ssh, "-v", "a"], [ssh, "-v", "b"]]
    for line in lines:
        expected = "-m fivefold train --preset tiny --training.steps=7 --run.folder=runs/x"
        assert line[3].startswith("cd /f && exec env ")
        assert line[3].endswith(expected)
    assert not (tmp_path / "ran").exists()


def test_hosts_that_cannot_be_reached_are_named_before_anything_trains(tmp_path):
    words = ("--hosts", "gone1,gone2", "--nproc-per-node", "2", "--ssh", make_ssh(tmp_path))
    ended = typed(*TINY, *words)
    assert ended.exit_code == 1
    assert ended.stderr.splitlines() == [
        "gone1: cannot be reached: ssh: connect to host gone1 port 22: No route to host",
        "gone2: cannot be reached: ssh: connect to host gone2 port 22: No route to host",
        "Nothing was started.",
    ]
