"""The processes of ranks, seen from outside: running, stopped or gone; and their stacks. No torch."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Literal

from fivefold.watch.beat import Beat, stack_of

State = Literal["runs", "stopped", "gone", "elsewhere"]
STACK_SIGNAL = signal.SIGUSR2
"""A rank that gets it leaves the stacks of its threads, whatever it does."""
STACK_S = 2.0


def born(pid: int) -> int:
    """When a process started, in ticks since the machine did; 0 where the system does not say."""
    fields = _fields(pid)
    return int(fields[19]) if fields else 0


def state_of(beat: Beat) -> State:
    """What has become of the process that wrote a beat; `elsewhere` when it is another machine's."""
    if beat.host != socket.gethostname():
        return "elsewhere"
    fields = _fields(beat.pid)
    if not fields or (beat.born and int(fields[19]) != beat.born) or fields[0] in "ZX":
        return "gone" if os.path.isdir("/proc/self") else "elsewhere"
    return "stopped" if fields[0] in "Tt" else "runs"


def stack_now(run: Path, beat: Beat) -> str:
    """Where a process of this machine is now, by its main thread; empty when it does not say.

    For one whose own heartbeat has stopped: Python does not get to run in it.
    """
    path = stack_of(run, beat.rank)
    try:
        os.truncate(path, 0)
        os.kill(beat.pid, STACK_SIGNAL)
    except OSError:
        return ""
    ends = time.monotonic() + STACK_S
    while time.monotonic() < ends:
        time.sleep(0.1)
        place = innermost(path.read_text(encoding="utf-8", errors="replace"))
        if place:
            return place
    return ""


def innermost(stacks: str) -> str:
    """The innermost place of the last thread in a dump of `faulthandler`: the main one."""
    threads = stacks.split("(most recent call first):\n")[1:]
    found = re.match(r'\s*File "(?:.*/)?(.+?)", line (\d+) in (\S+)', threads[-1]) if threads else None
    return "{}:{} in {}".format(*found.groups()) if found else ""


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []
