"""Plants a bug into a copy of the repository, and runs the tests that should see it."""

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
MARK = "FIVEFOLD_MUTANTS"
"""In the environment of all that runs in a copy, whatever session it is in: the copy's folder."""

Verdict = Literal["caught", "survived", "invalid"]
TESTS_FAILED, ALL_PASSED = 1, 0  # exit codes of pytest

_seconds = count(1_000_000_000)
"""Modification times: each version of a file has its own, or Python would run the old one's bytecode."""


@dataclass(frozen=True)
class Outcome:
    """What became of a bug.

    said  the tests that saw it; or what pytest said where none did; or why it could not be tried
    """

    verdict: Verdict
    said: str
    seconds: float


@contextmanager
def copy_of_repository() -> Iterator[Path]:
    """A folder with every file that git tracks or would track. What still runs in it at the end is ended."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="fivefold-mutants-", ignore_cleanup_errors=True) as folder:
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (source := REPOSITORY / name).is_file():
                target = Path(folder) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        try:
            yield Path(folder)
        finally:
            end_all(Path(folder))


def tried(mutant: Mutant, folder: Path) -> Outcome:
    """Plant the bug in the copy `folder`, run its tests there, and take it out again."""
    file = folder / mutant.path
    try:
        text = file.read_text()
        planted = mutant.planted(text)
    except (OSError, ValueError) as error:
        return Outcome("invalid", str(error), 0.0)
    try:
        _write(file, planted)
        return run_tests(mutant.tests, folder)
    finally:
        _write(file, text)


def run_tests(tests: Iterable[str], folder: Path, first_failure: bool = True) -> Outcome:
    """The tests, fast or slow, on the code in `folder`."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider"]
    command += [
        "--no-header",
        "--tb=line",
        "-rfE",
        f"--timeout={LIMIT_S}",
        *(["-x"] if first_failure else []),
    ]
    paths = {"PYTHONPATH": f"{folder / 'src'}:{folder}", MARK: str(folder)}
    begun = time.monotonic()
    process = subprocess.Popen(
        [*command, *tests],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **paths},
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
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end_all(folder)
        process.wait()
    return Outcome(*_judged(process.returncode, output), time.monotonic() - begun)


def _judged(code: int, output: str) -> tuple[Verdict, str]:
    """What pytest's exit code and its words say of a bug."""
    lines = output.strip().splitlines()
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if code == TESTS_FAILED and failed:
        return "caught", "\n".join(failed)
    if code == ALL_PASSED:
        return "survived", lines[-1] if lines else ""
    reasons = [line for line in lines if line.startswith(("E  ", "ERROR", "INTERNALERROR"))]
    return "invalid", "\n".join((reasons or lines)[-3:])


def end_all(folder: Path) -> None:
    """End whatever runs in a copy: nothing that a test with a bug left running outlives it.

    Where there is no /proc, only what is in pytest's own session is ended (`run_tests`).
    """
    mark = f"{MARK}={folder}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    seconds = next(_seconds)
    os.utime(file, (seconds, seconds))
