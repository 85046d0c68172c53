"""Moments in the life of a run, seen from outside: by its files, its processes and what it says.

Each waits for something new in the run's folder or the cache, looking every half millisecond.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.0005
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Watched:
    """A run that is under way: its process, its folder, its cache of tokens, the file with what it says."""

    process: subprocess.Popen[bytes]
    folder: Path
    cache: Path
    output: Path


def paths(root: Path, pattern: str) -> Callable[[Watched], set[object]]:
    """What is there by this pattern; a file that was written anew counts as another one."""

    def found(run: Watched) -> set[object]:
        base = run.cache if root == Path("cache") else run.folder / root
        seen: set[object] = set()
        for path in base.glob(pattern):
            try:
                stat = path.stat()
            except OSError:
                continue
            seen.add((path, stat.st_ino, stat.st_ctime_ns))
        return seen

    return found


def steps_taken(run: Watched) -> set[object]:
    try:
        return set(range((run.folder / "metrics.jsonl").read_bytes().count(b"\n")))
    except OSError:
        return set()


def ranks_there(run: Watched) -> set[object]:
    return set(ranks_of(run.process.pid))


def restarts_told(run: Watched) -> set[object]:
    return set(range(run.output.read_bytes().count(b"Starting again")))


SAVING = Path("checkpoints")
MOMENTS: dict[str, tuple[Callable[[Watched], set[object]], float]] = {
    "some step": (steps_taken, 0.05),
    "start": (lambda run: {run.process.pid}, 3.0),
    "data build": (paths(Path("cache"), "*.partial-*"), 0.02),
    "build and load": (ranks_there, 1.0),
    "restart": (restarts_told, 1.5),
    "save: a rank's file": (paths(SAVING, "*.partial/*.safetensors"), 0.002),
    "save: manifest": (paths(SAVING, "*.partial/manifest.json"), 0.0),
    "save: commit marker": (paths(SAVING, "*.partial/COMMIT"), 0.0),
    "save: renamed": (paths(SAVING, "step-*[0-9]"), 0.0),
    "save: latest": (paths(SAVING, "latest"), 0.001),
}
"""By name: what has to be new, and up to how many seconds later the blow falls."""


def arrive(moment: str, run: Watched, seen: set[object], later: float) -> bool:
    """Wait for a moment, and for a share `later` of its time after; False where the run ended before.

    seen  what was there when the waiting began
    """
    look, spread = MOMENTS[moment]
    deadline = time.monotonic() + PATIENCE_S
    while not look(run) - seen:
        if run.process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    time.sleep(spread * later)
    return run.process.poll() is None


def ranks_of(launcher: int) -> list[int]:
    """The processes that the server of a run has forked."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    servers = [pid for pid, parent in parents.items() if parent == launcher]
    return sorted(pid for pid, parent in parents.items() if parent in servers)


def all_gone(pids: list[int], within: float = 20.0) -> bool:
    """Whether these processes end in time."""
    deadline = time.monotonic() + within
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
