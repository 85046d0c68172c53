"""The table of bugs is up to date: each can be planted, and the tests that should see it are there."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.plant import Outcome, tried
from tests.mutants.table import REPOSITORY, Mutant, mutants

EVERY = mutants()


def test_names_occur_once() -> None:
    assert [name for name, times in Counter(m.name for m in EVERY).items() if times > 1] == []


@pytest.mark.parametrize("room", sorted({m.room for m in EVERY}))
def test_every_bug_of_a_room_can_be_planted(room: str) -> None:
    for mutant in (m for m in EVERY if m.room == room):
        assert mutant.file.startswith(room), f"{mutant.name}: {mutant.file} is not in {room}"
        ast.parse(mutant.planted((REPOSITORY / mutant.path).read_text()))


def test_every_named_test_is_there() -> None:
    for mutant in EVERY:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert (REPOSITORY / file).exists(), f"{mutant.name}: {file}"
            if name:
                functions = {
                    n.name
                    for n in ast.walk(ast.parse((REPOSITORY / file).read_text()))
                    if isinstance(n, ast.FunctionDef)
                }
                assert name.split("[")[0].split("::")[-1] in functions, f"{mutant.name}: {test}"


# --- planting itself ---------------------------------------------------------------------------------------

SUM = "def total(a, b):\n    return a + b\n"
TEST = "from fivefold.sum import total\n\n\ndef test_total():\n    assert total(2, {other}) == {sum}\n"


def planted_in(folder: Path, other: int, new: str = "a * b") -> Outcome:
    """A bug in a small project whose test adds 2 and `other`."""
    (folder / "src/fivefold").mkdir(parents=True)
    (folder / "src/fivefold/__init__.py").touch()
    (folder / "src/fivefold/sum.py").write_text(SUM)
    (folder / "test_sum.py").write_text(TEST.format(other=other, sum=2 + other))
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: slow"]\n')
    outcome = tried(Mutant("", "product", "sum.py", "a + b", new, ("test_sum.py",)), folder)
    assert (folder / "src/fivefold/sum.py").read_text() == SUM
    return outcome


def test_a_bug_that_a_test_sees_is_caught_and_taken_out_again(tmp_path: Path) -> None:
    assert planted_in(tmp_path, 3).verdict == "caught"


def test_a_bug_that_no_test_sees_survives(tmp_path: Path) -> None:
    assert planted_in(tmp_path, 2).verdict == "survived"


def test_a_bug_that_does_not_load_is_not_called_caught(tmp_path: Path) -> None:
    assert planted_in(tmp_path, 3, "a +").verdict == "invalid"


def test_a_table_out_of_date_is_said() -> None:
    with pytest.raises(ValueError, match="occurs 3 times"):
        Mutant("", "product", "sum.py", "a", "b", ()).planted(SUM)
