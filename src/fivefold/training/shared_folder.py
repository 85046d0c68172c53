"""Whether all hosts see the run's folder: rank 0 puts a checkpoint together from the files of all ranks."""

import os
import socket
import time
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from fivefold.problems import Problem

WAIT_S = 20.0
"""How long a file may take to be seen on another host: network file systems remember what was not there."""


def check_shared(folder: Path, rank: int, wait_s: float = WAIT_S) -> list[Problem]:
    """Why the ranks of this process group cannot save into `folder` together; every rank calls it.

    Rank 0 leaves a file there, and every rank looks for it.
    """
    token: list[str] = [f".seen-by-all-{uuid4().hex}"]
    host = socket.gethostname()
    if rank == 0:
        (folder / token[0]).touch()
    try:
        told: list[str | None] = [None] * dist.get_world_size()
        dist.broadcast_object_list(token, src=0)
        writer = [host]
        dist.broadcast_object_list(writer, src=0)
        wrong = trouble(folder, token[0], wait_s)
        dist.all_gather_object(told, f"'{folder}' on {host} {wrong}" if wrong else None)
    finally:
        if rank == 0:
            (folder / token[0]).unlink(missing_ok=True)
    hint = "Put it where all hosts can read and write it, on a shared file system: --run.folder."
    return [
        Problem("run.folder", sentence.format(writer=writer[0]), hint)
        for sentence in dict.fromkeys(filter(None, told))
    ]


def trouble(folder: Path, token: str, wait_s: float) -> str | None:
    """What is wrong with a folder in which there should be a file of this name; None if nothing is."""
    deadline = time.monotonic() + wait_s
    while not (folder / token).exists():
        if not folder.is_dir():
            reason = "does not exist, but rank 0 on {writer} writes into it"
        else:
            reason = "is another folder than that of rank 0 on {writer}"
        if time.monotonic() > deadline:
            return reason
        time.sleep(0.1)
    return None if os.access(folder, os.W_OK | os.X_OK) else "cannot be written to"
