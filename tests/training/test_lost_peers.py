"""A rank that a launcher started ends soon after it failed, whatever still waits in it."""

import json
import subprocess
import sys

import pytest

GLOO = (
    "[/a/gloo/transport/tcp/pair.cc:537] Read error [10.55.0.2]:7909: Connection reset by peer. "
    "This is typically caused by a remote worker hanging."
)
FAILURES = {
    f"raise RuntimeError({GLOO!r})": 1,
    "raise ValueError('mine')": 1,
    "sys.exit(143)": 143,
}
STUCK = """
import json, os, sys, threading, time
import torch
from fivefold.comm.world import World
from fivefold.training.lost_peers import ending_promptly
codes = []
for failure in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        threading.Thread(target=time.sleep, args=(1000,)).start()  # as one that waits for the files of all
        with ending_promptly(World(0, 2, 0, torch.device("cpu"), "torchrun"), grace_s=0.5):
            exec(failure)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def ended() -> subprocess.CompletedProcess[str]:
    """Processes that fail while a thread of theirs waits; forked from one, for torch is slow to load."""
    words = [sys.executable, "-c", STUCK, json.dumps(list(FAILURES))]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)


def test_a_process_that_still_waits_ends_with_the_code(ended):
    assert json.loads(ended.stdout) == list(FAILURES.values())


def test_the_loss_of_a_peer_is_told_in_a_line(ended):
    told = "rank 0 lost another rank: Read error [10.55.0.2]:7909: Connection reset by peer"
    assert [line for line in ended.stderr.splitlines() if line.endswith(told)]
    assert "typically caused" not in ended.stderr
    assert "ValueError: mine" in ended.stderr
