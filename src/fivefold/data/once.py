"""Folders that are built once, however many processes ask for them at the same time.

A folder is filled under another name and renamed when it is whole, so no process ever sees half of one.
A lock makes others wait instead of building it too. The system drops the lock of a process that is
killed; what it leaves behind is swept up by the next build.
"""

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fivefold.problems import BadInput, Problem


def build_once(folder: Path, complete: Callable[[Path], bool], fill: Callable[[Path], None]) -> Path:
    """`folder`, built now by `fill` unless it is already `complete`. A damaged one is built again."""
    if complete(folder):
        return folder
    with _locked(folder.with_name(folder.name + ".lock")):
        if complete(folder):
            return folder
        # Named after this machine, because not every shared file system locks across machines.
        partial = folder.with_name(f"{folder.name}.partial-{socket.gethostname()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            fill(partial)
            _flush(partial)
            if not complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(partial, folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _unusable(folder.parent, error) from None
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock at `path`, waiting for it as long as it takes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise _unusable(path.parent, error) from None
    with file:
        yield


def _unusable(folder: Path, error: OSError) -> BadInput:
    hint = "Name a folder that can be written to, has room and supports file locks."
    return BadInput([Problem("data.cache", f"{folder} cannot be used: {error.strerror}", hint)])


def _flush(folder: Path) -> None:
    """Have everything in `folder` on disk, so that a power cut after the rename finds it there."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
