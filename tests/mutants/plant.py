"""Plants one bug after the other into a copy of the repository, and runs the tests that should see it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from tests.mutants.table import REPOSITORY, Mutant

LIMIT_S = 600
"""A bug that makes its tests run longer than this is caught: somebody would notice."""

Verdict = Literal["caught", "survived", "invalid"]
TESTS_FAILED, ALL_PASSED = 1, 0  # exit codes of pytest

_seconds = count(1_000_000_000)
"""Modification times: each version of a file has its own, or Python would run the old one's bytecode."""


@dataclass(frozen=True)
class Outcome:
    """What became of a bug: who saw it, or what pytest said when no test did."""

    verdict: Verdict
    said: str
    seconds: float


@contextmanager
def copy_of_repository() -> Iterator[Path]:
    """A folder with every file that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="fivefold-mutants-") as folder:
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (source := REPOSITORY / name).is_file():
                target = Path(folder) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        yield Path(folder)


def tried(mutant: Mutant, folder: Path) -> Outcome:
    """Plant the bug in the copy `folder`, run its tests there, and take it out again."""
    file = folder / mutant.path
    text = file.read_text()
    try:
        _write(file, mutant.planted(text))
        return run_tests(mutant.tests, folder)
    finally:
        _write(file, text)


def run_tests(tests: Iterable[str], folder: Path, first_failure: bool = True) -> Outcome:
    """The tests, fast or slow, on the code in `folder`."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider"]
    command += ["--no-header", "--tb=no", "-rfE", f"--timeout={LIMIT_S}", *(["-x"] if first_failure else [])]
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}:{folder}", "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    process = subprocess.Popen(
        [*command, *tests],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S if first_failure else None)
    except subprocess.TimeoutExpired:
        return Outcome("caught", f"ran longer than {LIMIT_S} s", time.monotonic() - begun)
    finally:
        _end_all(process)
    seconds = time.monotonic() - begun
    failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if process.returncode == TESTS_FAILED and failed:
        return Outcome("caught", "\n".join(failed), seconds)
    last = "\n".join(output.strip().splitlines()[-3:])
    return Outcome("survived" if process.returncode == ALL_PASSED else "invalid", last, seconds)


def _end_all(process: subprocess.Popen[str]) -> None:
    """Nothing that a test with a bug left running outlives it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    seconds = next(_seconds)
    os.utime(file, (seconds, seconds))
