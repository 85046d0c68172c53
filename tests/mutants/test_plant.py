"""Planting bugs: who is caught, what is kept, and that nothing is left behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.mutants.__main__ import in_copies
from tests.mutants.outcomes import Outcomes, green_fingerprint
from tests.mutants.plant import Outcome, end_all, run_tests, tried
from tests.mutants.report import is_enough, report
from tests.mutants.table import Mutant

SUM = "def total(a, b):\n    return a + b\n"
TEST = "from fivefold.sum import total\n\n\ndef test_total():\n    assert total(2, {other}) == {sum}\n"


def planted_in(folder: Path, other: int, new: str = "a * b") -> Outcome:
    """A bug in a small project whose test adds 2 and `other`."""
    project(folder, other)
    outcome = tried(Mutant("", "product", "sum.py", "a + b", new, ("test_sum.py",)), folder)
    assert (folder / "src/fivefold/sum.py").read_text() == SUM
    return outcome


def project(folder: Path, other: int) -> None:
    (folder / "src/fivefold").mkdir(parents=True)
    (folder / "src/fivefold/__init__.py").touch()
    (folder / "src/fivefold/sum.py").write_text(SUM)
    (folder / "test_sum.py").write_text(TEST.format(other=other, sum=2 + other))
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: slow"]\n')


def test_a_bug_that_a_test_sees_is_caught_and_taken_out_again(tmp_path: Path) -> None:
    assert planted_in(tmp_path, 3).verdict == "caught"


def test_a_bug_that_no_test_sees_survives(tmp_path: Path) -> None:
    assert planted_in(tmp_path, 2).verdict == "survived"


def test_a_bug_that_does_not_load_is_not_called_caught_and_the_reason_is_told(tmp_path: Path) -> None:
    outcome = planted_in(tmp_path, 3, "a +")
    assert outcome.verdict == "invalid"
    assert "test_sum.py" in outcome.said


def test_a_bug_that_cannot_be_planted_is_invalid(tmp_path: Path) -> None:
    outcome = tried(Mutant("", "product", "sum.py", "a + b", "a * b", ("test_sum.py",)), tmp_path)
    assert outcome.verdict == "invalid"
    assert "sum.py" in outcome.said


def test_a_table_out_of_date_is_said() -> None:
    with pytest.raises(ValueError, match="occurs 3 times"):
        Mutant("", "product", "sum.py", "a", "b", ()).planted(SUM)


# --- what is left behind, and what is kept -----------------------------------------------------------------

SLEEPER = """
import subprocess, sys, time
def test_sleeps():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open("child", "w").write(str(child.pid) + "\\n")
    time.sleep(600)
"""


def test_ending_all_that_runs_in_a_copy_leaves_no_process(tmp_path: Path) -> None:
    """Not even one that a test started in a session of its own."""
    (tmp_path / "test_sleeper.py").write_text(SLEEPER)
    running = threading.Thread(target=run_tests, args=(["test_sleeper.py"], tmp_path))
    running.start()
    child = tmp_path / "child"
    until(lambda: child.exists() and child.read_text().endswith("\n"))
    process = Path("/proc", child.read_text().strip())
    assert process.exists()
    end_all(tmp_path)
    running.join(60)
    assert not running.is_alive()
    until(lambda: not process.exists() or "State:\tZ" in (process / "status").read_text())


def until(condition, seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.05)


def test_whoever_stops_in_the_middle_leaves_no_copy() -> None:
    copies = []

    def act(task: int, folder: Path) -> bool:
        copies.append(folder)
        return (folder / "pyproject.toml").exists()

    results = in_copies([1, 2, 3], act, workers=1)
    assert next(results) == (1, True)
    results.close()
    assert not any(folder.exists() for folder in copies)


def test_a_worker_that_fails_is_heard() -> None:
    def act(task: int, folder: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        list(in_copies([1, 2], act, workers=1))


ONE, TWO = (
    Mutant("room", name, "toml.py", "a", "b", ("tests/mutants/test_table.py",)) for name in ("one", "two")
)


def test_outcomes_are_kept_until_something_changes(tmp_path: Path) -> None:
    kept = tmp_path / "build" / "mutants.json"
    Outcomes(kept).keep(ONE, ONE.fingerprint(), Outcome("caught", "test_x", 7.0))
    Outcomes(kept).keep(TWO, "of another copy", Outcome("caught", "test_x", 3.0))
    assert Outcomes(kept).of(ONE) == Outcome("caught", "test_x", 7.0)
    assert Outcomes(kept).of(TWO) is None
    assert Outcomes(kept).seconds(TWO) == 3.0  # how long it took is still a guess
    test = ONE.tests[0]
    assert not Outcomes(kept).is_green(test)
    Outcomes(kept).keep_green({test: green_fingerprint(test)})
    assert Outcomes(kept).is_green(test)
    assert Outcomes(kept).of(ONE) is not None


def test_a_test_is_green_until_a_source_changes(tmp_path: Path) -> None:
    project(tmp_path, 3)
    before = green_fingerprint("test_sum.py", tmp_path)
    assert before == green_fingerprint("test_sum.py", tmp_path)
    (tmp_path / "src/fivefold/sum.py").write_text("")
    assert before != green_fingerprint("test_sum.py", tmp_path)


def test_the_report_names_who_was_not_caught_and_why() -> None:
    caught, survived = Outcome("caught", "test_x", 1.0), Outcome("survived", "1 passed", 1.0)
    told = report([ONE, TWO], {"one": caught, "two": survived})
    assert "all                  2       1  (50.0%)" in told
    assert "survived: two (src/fivefold/toml.py)\n  no reason is known: it passes tests/mutants/" in told
    assert "it could not be tried: E  no" in report([TWO], {"two": Outcome("invalid", "E  no", 1.0)})
    assert not is_enough([ONE, TWO], {"one": caught, "two": survived})
    assert is_enough([ONE], {"one": caught})
    assert not is_enough([ONE], {"one": None})
