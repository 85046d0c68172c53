"""Several hosts, as network namespaces: what is lost with one of them, and how a run goes on."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.host_loss import (
    STEPS,
    attempts,
    final_files,
    largest_difference,
    losses,
    train_alone,
    train_and_lose_a_host,
    train_until_the_link_drops,
)
from benchmarks.hosts import Host, NoHostsError, hosts
from fivefold.config.run_folder import ranks_had

SERVE = (
    "import socket\nwith socket.create_server(('', 5000)) as s:\n while True: s.accept()[0].sendall(b'here')"
)
ASK = "import socket; print(socket.create_connection(('host0', 5000), timeout=1).recv(9).decode())"


@pytest.fixture(scope="module", autouse=True)
def _hosts_can_be_made():
    try:
        with hosts(1):
            pass
    except NoHostsError as error:
        pytest.skip(f"no hosts can be made here: {error}")


def answer(host: Host) -> str:
    asked = host.start([sys.executable, "-c", ASK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return str(asked.communicate(timeout=60)[0]).strip()


def test_hosts_reach_each_other_by_name_until_one_is_lost():
    with hosts(2) as [first, second]:
        server = first.start([sys.executable, "-c", SERVE])
        while answer(second) != "here":
            time.sleep(0.1)
        first.cut()
        assert answer(second) == ""
        assert server.poll() is None
        first.bring_back()
        assert answer(second) == "here"
        first.kill()
        assert server.poll() is not None
        first.bring_back()
        assert answer(second) == ""
        name = second.start(["cat", "/proc/sys/kernel/hostname"], stdout=subprocess.PIPE, text=True)
        assert name.communicate(timeout=60)[0] == "host1\n"
        second.start(["sleep", "1000"])
        made = [first.namespace, second.namespace, first.switch]
    assert not any(Path("/run/netns", namespace).exists() for namespace in made)


@pytest.mark.slow
def test_an_elastic_run_goes_on_with_the_host_that_is_left(tmp_path):
    """The other one, which had rank 0 and the folder's lock, is lost without a word."""
    run = train_and_lose_a_host(tmp_path, elastic=True, silently=True)
    assert (ranks_had(run), attempts(run), len(losses(run))) == (2, 2, STEPS)
    assert largest_difference(run, train_alone(tmp_path, "one", "--layout.dp_shard", "1")) < 1e-9


@pytest.mark.slow
def test_another_run_waits_for_the_hosts_return(tmp_path):
    run = train_and_lose_a_host(tmp_path, elastic=False)
    assert (ranks_had(run), attempts(run), len(losses(run))) == (4, 2, STEPS)
    assert final_files(run) == final_files(train_alone(tmp_path, "four"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], "rank 0 lost another rank: "),
        (["--communication.local_steps", "20"], "replica 1 (rank 1) did not send its part of the average"),
    ],
    ids=["sums of gradients", "local steps"],
)
def test_a_link_that_drops_is_told_and_ends_the_run(tmp_path, settings, told):
    """Nobody is told that it is down: only silence says so."""
    run, printed = train_until_the_link_drops(tmp_path, *settings)
    assert told in printed
    assert "[10.55.0.2]" in printed
    assert {path.name for path in (run / "errors").iterdir()} >= {"rank-0.json", "rank-1.json"}
