"""One run writes a folder at a time: who it is stands in the folder, and a second one is refused."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fivefold.problems import BadInput, Problem

LOCK = "writer.lock"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run's folder inside the block. Raises `BadInput` where another process holds it.

    A lock whose process has ended on this host is taken over.
    """
    path = run / LOCK
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}
    while True:
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            owner = _owner(path)
            if owner is not None and _alive(owner):
                raise BadInput([_held(run, owner)]) from None
            with suppress(FileNotFoundError):
                path.unlink()
            continue
        os.write(handle, json.dumps(mine).encode())
        os.close(handle)
        break
    try:
        yield
    finally:
        if _owner(path) == mine:
            path.unlink()


def _held(run: Path, owner: dict[str, Any]) -> Problem:
    message = f"'{run}' is being written by process {owner.get('pid')} on {owner.get('host')}"
    hint = f"Wait for it, name another folder with --run, or remove {LOCK} there if that process is gone."
    return Problem("run.folder", message, hint)


def _owner(path: Path) -> dict[str, Any] | None:
    """Who holds a lock; None where it cannot be read, as after a crash while it was written."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _alive(owner: dict[str, Any]) -> bool:
    """Whether the owner still runs. Of another host that cannot be seen: it is taken to."""
    if owner.get("host") != socket.gethostname():
        return True
    pid = owner.get("pid")
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return owner.get("started") == _started(pid)


def _started(pid: int) -> str:
    """When a process began, as the system counts: another process may have its number by now."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
