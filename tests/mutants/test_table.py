"""The table of bugs is up to date: each can be planted, and the tests that should see it are there."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.mutants.table import REPOSITORY, mutants

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
