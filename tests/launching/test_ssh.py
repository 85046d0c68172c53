"""Hosts over a program that is called like ssh: what is run there, who cannot start, and real trainings.

The program runs commands in a shell of this machine, or, where root may make them, in hosts of network
namespaces.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.hosts import LINK, Host, NoHostsError, hosts
from fivefold.config import load
from fivefold.launching.machines import Launch
from fivefold.launching.ssh import Hosts, check_hosts, commands, read_hosts, read_ssh
from fivefold.problems import BadInput, BadNews
from fivefold.training.metrics import read_metrics
from tests.commands.typed import SMALL
from tests.launching.like_ssh import make_ssh

PATHS = os.pathsep.join(filter(None, sys.path))
JOB = load(None, "tiny", ["--run.folder=runs/x"])


def launch(**more) -> Launch:
    given = {
        "words": ["job.toml", "--run.folder=runs/x y"],
        "python": sys.executable,
        "env": {"PYTHONPATH": PATHS},
    }
    return Launch(JOB, 2, 4, **{**given, **more})


def two(tmp_path: Path, *names: str, **more) -> Hosts:
    given = {"folder": str(tmp_path), "master": "a"}
    return Hosts(names or ("a", "u@b"), (make_ssh(tmp_path),), **{**given, **more})


def test_hosts_are_read():
    assert read_hosts("a, user@b,c.d-e") == ("a", "user@b", "c.d-e")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        (" , ", "names no host"),
        ("a,b,a", "a is named twice"),
        ("a,user@a", "a is named twice"),
        ("a,-oProxyCommand=x", "is not the name of a host"),
        ("a:22,b", "is not the name of a host"),
        ("a;rm,b", "is not the name of a host"),
    ],
)
def test_hosts_that_are_none(text, said):
    with pytest.raises(BadInput, match=said):
        read_hosts(text)


def test_an_ssh_that_is_not_there():
    with pytest.raises(BadInput, match="there is no program 'no-such-ssh' here"):
        read_ssh("no-such-ssh -v")
    assert read_ssh("sh -c 'x y'") == ("sh", "-c", "x y")


def test_every_host_gets_one_line_and_the_first_one_serves(tmp_path):
    reached = two(tmp_path, folder="/some folder", master="10.0.0.1")
    first, second = commands(launch(), reached).values()
    assert [first[1], second[1]] == ["a", "u@b"]
    line = shlex.split(first[2])
    assert line[:5] == ["cd", "/some folder", "&&", "exec", "env"]
    assert line[-4:] == ["fivefold", "train", "job.toml", "--run.folder=runs/x y"]
    shared = {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=10.0.0.1:29400"}
    assert shared | {"--local-addr=10.0.0.1", "--rdzv-conf=is_host=true"} <= set(line)
    assert shared | {"--local-addr=b", "--rdzv-conf=is_host=false"} <= set(shlex.split(second[2]))
    ids = {
        word for line in (first[2], second[2]) for word in shlex.split(line) if word.startswith("--rdzv-id=")
    }
    assert len(ids) == 1


def test_hosts_that_can_start_are_silent(tmp_path):
    (tmp_path / "job.toml").touch()
    check_hosts(launch(), two(tmp_path, job="job.toml"))


@pytest.mark.parametrize(
    ("names", "where", "how", "said"),
    [
        (("a", "gone1", "gone2"), {}, {}, "gone1: cannot be reached: ssh: .*\ngone2: cannot be reached"),
        (
            (),
            {"folder": "/no/such"},
            {},
            "a: there is no folder /no/such (--folder)\nu@b: there is no folder",
        ),
        ((), {"job": "job.toml"}, {}, "a: there is no job.toml in .*: hosts must share it"),
        ((), {}, {"python": "no-such-python"}, "a: no-such-python cannot import fivefold (--python): "),
        ((), {}, {"env": {"PYTHONPATH": ""}, "python": "/usr/bin/env false"}, "a: .* cannot import fivefold"),
    ],
)
def test_hosts_that_cannot_start_are_named_all_at_once(tmp_path, names, where, how, said):
    with pytest.raises(BadNews, match=said.replace("(", r"\(").replace(")", r"\)")) as told:
        check_hosts(launch(**how), two(tmp_path, *names, **where))
    assert str(told.value).endswith("Nothing was started.")


def test_hosts_with_other_versions_are_refused(tmp_path):
    script = '#!/bin/sh\nif [ "$1" = a ]; then echo 1.0; else echo 1.1; fi\n'
    reached = Hosts(("a", "b"), (make_ssh(tmp_path, script),), str(tmp_path), "a")
    with pytest.raises(BadNews, match=r"different versions of fivefold: 1\.0 on a, 1\.1 on b"):
        check_hosts(launch(), reached)


# --- real trainings: two ranks on two hosts -----------------------------------------------------------------

NAMESPACES = """#!/bin/sh
name=$1; shift
exec ip netns exec {prefix}$name unshare --uts sh -c "echo $name > /proc/sys/kernel/hostname && $*"
"""


def start(
    folder: Path, *words: str, names: str = "127.0.0.1,127.0.0.2", link: str = "lo"
) -> subprocess.Popen[str]:
    """`fivefold launch` of a small job with one rank a host; its lines go to the file `said`."""
    options = ["--hosts", names, "--nproc-per-node", "1", "--ssh", str(folder / "like-ssh"), "--grace", "60"]
    options += ["--env", f"PYTHONPATH={PATHS}", "--env", f"GLOO_SOCKET_IFNAME={link}"]
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "fivefold", "launch", *SMALL, *options, "--run", "runs/x", *words],
            cwd=folder,
            stdout=said,
            stderr=said,
            text=True,
            env={**os.environ, "PYTHONPATH": PATHS},
        )


def train_until_a_step(folder: Path, *words: str, **options: str) -> subprocess.Popen[str]:
    running = start(folder, "--training.steps", "1000000", *words, **options)
    deadline = time.monotonic() + 120
    while not read_metrics(folder / "runs/x"):
        assert running.poll() is None, (folder / "said").read_text()
        assert time.monotonic() < deadline, (folder / "said").read_text()
        time.sleep(0.1)
    return running


def processes_of(folder: Path) -> list[int]:
    """Processes that were started in a folder, but for the command itself."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.readlink() == folder and b"launching.host" in (link.parent / "cmdline").read_bytes():
                found.append(int(link.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_two_hosts_train_together(tmp_path):
    make_ssh(tmp_path)
    ended = start(tmp_path, "--training.steps", "3").wait(200)
    said = (tmp_path / "said").read_text()
    assert ended == 0, said
    assert "127.0.0.1 | step 3/3" in said
    assert [line["step"] for line in read_metrics(tmp_path / "runs/x")] == [1, 2, 3]
    assert load(str(tmp_path / "runs/x/job.toml")).layout.dp_shard == 2


@pytest.mark.slow
def test_stopping_lets_all_hosts_save_and_end(tmp_path):
    make_ssh(tmp_path)
    running = train_until_a_step(tmp_path)
    running.terminate()
    assert running.wait(100) == 143
    said = (tmp_path / "said").read_text()
    assert "It was asked to stop. To go on:" in said
    assert "Traceback" not in said
    assert processes_of(tmp_path) == []
    assert (tmp_path / "runs/x/checkpoints/latest").exists()


@pytest.mark.slow
def test_a_rank_that_dies_names_its_host(tmp_path):
    make_ssh(tmp_path)
    running = train_until_a_step(tmp_path, "--resilience.restarts", "0")
    [agent] = [one for one in processes_of(tmp_path) if b"local-addr=127.0.0.2" in cmdline(one)]
    [rank] = map(int, subprocess.check_output(["pgrep", "-P", str(agent)]).split())
    os.kill(rank, 9)
    assert running.wait(100) == 1
    said = (tmp_path / "said").read_text()
    assert said.splitlines()[-1] == "127.0.0.2 failed: exit code 1. 127.0.0.1 had to stop."
    assert "was ended by SIGKILL" in said
    assert "Traceback" not in said
    assert processes_of(tmp_path) == []


def cmdline(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


@pytest.fixture
def namespaces(tmp_path):
    try:
        with hosts(2) as made:
            prefix = made[0].namespace.removesuffix(made[0].name)
            make_ssh(tmp_path, NAMESPACES.format(prefix=prefix))
            yield made
    except NoHostsError as error:
        pytest.skip(f"no hosts can be made here: {error}")


@pytest.mark.slow
def test_hosts_with_networks_of_their_own_train_together(tmp_path, namespaces):
    ended = start(tmp_path, "--training.steps", "3", names="host0,host1", link=LINK).wait(200)
    said = (tmp_path / "said").read_text()
    assert ended == 0, said
    assert "host0 | step 3/3" in said


@pytest.mark.slow
def test_a_host_that_is_lost_is_named_and_the_other_one_ends(tmp_path, namespaces: list[Host]):
    running = train_until_a_step(tmp_path, names="host0,host1", link=LINK)
    namespaces[1].kill()
    assert running.wait(100) == 1
    said = (tmp_path / "said").read_text()
    assert said.splitlines()[-1].startswith("host1 failed: ")
    assert said.splitlines()[-1].endswith(" host0 had to stop.")
    assert processes_of(tmp_path) == []
