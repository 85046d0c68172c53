"""A real process: runs, says where it is, is stopped, goes on, is gone."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from fivefold.watch.beat import Beat, stack_of
from fivefold.watch.processes import State, born, stack_now, state_of

BUSY = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR2, open(sys.argv[1], "a"), all_threads=True)

def spin():
    print("ready", flush=True)
    while True:
        pass

spin()
"""


def becomes(beat: Beat, state: State) -> bool:
    ends = time.monotonic() + 10
    while state_of(beat) != state and time.monotonic() < ends:
        time.sleep(0.05)
    return state_of(beat) == state


def test_a_process_seen_from_outside(tmp_path: Path) -> None:
    stack = stack_of(tmp_path, 0)
    stack.parent.mkdir()
    stack.touch()
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(stack)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    now = time.time()
    host, started = socket.gethostname(), born(process.pid)
    beat = Beat(0, 1, host, process.pid, started, 3, "optimizer", 0, moved=now, at=now, patience=0.0)
    assert state_of(beat) == "runs"
    assert re.fullmatch(r"<string>:[678] in spin", stack_now(tmp_path, beat))
    os.kill(process.pid, signal.SIGSTOP)
    assert becomes(beat, "stopped")
    os.kill(process.pid, signal.SIGCONT)
    assert becomes(beat, "runs")
    assert state_of(replace(beat, born=started + 1)) == "gone"  # a later process of the same number
    assert state_of(replace(beat, host="elsewhere")) == "elsewhere"
    process.kill()
    assert becomes(beat, "gone")  # a zombie is
    process.wait()
    assert state_of(beat) == "gone"
