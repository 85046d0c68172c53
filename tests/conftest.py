"""Tests run on the CPU, one thread a rank: the ranks share the cores, and a machine may have one GPU or none.

`pytest tests/gpu` is for what only a GPU can show, and sees it.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not any("tests/gpu" in argument for argument in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A job in a shell's background ignores SIGINT, and the programs that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_program_outlives_its_test() -> Iterator[None]:
    """A test that fails leaves the training that it started: it would slow down all tests behind it."""
    before = _programs()
    yield
    for pid in _programs() - before:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # its ranks end with it


def _programs() -> set[int]:
    """Children of this process that run fivefold; none where there is no /proc."""
    children = b" ".join(map(_content, Path("/proc/self/task").glob("*/children")))
    return {
        pid
        for pid in map(int, children.split())
        if b"fivefold" in _content(Path(f"/proc/{pid}/cmdline")).split(b"\0")
    }


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # a thread or a process that has ended
        return b""
