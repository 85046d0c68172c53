"""One run writes a folder at a time: who it is stands in the folder, and a second one is refused.

The system drops the lock of a process that has ended, however it ended. Not every shared file system locks
across machines, so a folder that another host has written its name into is refused too.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fivefold.problems import BadInput, Problem

LOCK, RANKS = "writer.lock", "ranks.lock"
RANKS_GONE_S = 20.0
"""How long the ranks of a run whose starting process was killed may take to notice."""


@contextmanager
def locked(run: Path, launch: str | None = None) -> Iterator[None]:
    """Hold a run's folder inside the block. Raises `BadInput` where another process holds it.

    launch  a name of the job that outlives its hosts: what it has left behind on one of them is its own
    """
    path, here = run / LOCK, socket.gethostname()
    with _opened(run) as file:
        owner = _owner(path)
        if owner.get("host", here) != here and (launch is None or owner.get("launch") != launch):
            raise BadInput([_held(run, owner)])
        _await_ranks(run)
        file.truncate(0)
        file.write(json.dumps({"host": here, "pid": os.getpid(), "launch": launch}))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def in_use(run: Path) -> Iterator[None]:
    """Held by each rank: the next run waits for ranks that outlive the process that started them."""
    with (run / RANKS).open("a") as file:
        with suppress(OSError):  # a file system without locks: then nobody waits
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _await_ranks(run: Path) -> None:
    """Wait until no rank of an earlier run is left. Raises `BadInput` where they stay."""
    deadline = time.monotonic() + RANKS_GONE_S
    with (run / RANKS).open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"ranks of an earlier run still write into '{run}'"
                    raise BadInput(
                        [Problem("run.folder", message, "End them, or name another folder.")]
                    ) from None
                time.sleep(0.05)
            except OSError:
                return


def _opened(run: Path) -> IO[str]:
    """The folder's lock, held as long as the file is open."""
    path = run / LOCK
    while True:
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            hint = "Name another folder with --run."
            message = f"'{run}' cannot be written: {error.strerror}"
            raise BadInput([Problem("run.folder", message, hint)]) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                return file
        except BlockingIOError:
            file.close()
            raise BadInput([_held(run, _owner(path))]) from None
        except FileNotFoundError:
            pass
        file.close()  # whoever held it has removed it since it was opened


def _held(run: Path, owner: dict[str, Any]) -> Problem:
    message = f"'{run}' is being written by process {owner.get('pid')} on {owner.get('host')}"
    hint = f"Wait for it, name another folder with --run, or remove {LOCK} there if that process is gone."
    return Problem("run.folder", message, hint)


def _owner(path: Path) -> dict[str, Any]:
    """Who wrote a lock; empty where it cannot be read, as after a crash while it was written."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
