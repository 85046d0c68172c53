"""A rank that a launcher started ends soon after it failed, whatever still waits in it."""

import subprocess
import sys

import pytest

STUCK = """
import sys, threading, time
import torch
from fivefold.comm.world import World
from fivefold.training.lost_peers import ending_promptly
threading.Thread(target=time.sleep, args=(1000,)).start()  # as one that waits for the files of all ranks
with ending_promptly(World(0, 2, 0, torch.device("cpu"), "torchrun"), grace_s=0.5):
    {failure}
"""


def test_the_loss_of_a_peer_is_told_in_a_line():
    gloo = (
        "[/a/gloo/transport/tcp/pair.cc:537] Read error [10.55.0.2]:7909: Connection reset by peer. "
        "This is typically caused by a remote worker hanging."
    )
    code = STUCK.format(failure=f"raise RuntimeError({gloo!r})")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.endswith("rank 0 lost another rank: Read error [10.55.0.2]:7909: Connection reset by peer")


@pytest.mark.parametrize(("failure", "code"), [("raise ValueError('mine')", 1), ("sys.exit(143)", 143)])
def test_a_process_that_still_waits_ends_with_the_code(failure, code):
    ended = subprocess.run([sys.executable, "-c", STUCK.format(failure=failure)], timeout=120)
    assert ended.returncode == code
