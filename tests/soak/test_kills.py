"""Two kills in the fast suite, a dozen in the slow one; `tests/soak/kills.py` has them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.kills import Blow, Setting, harm, plan


@pytest.mark.timeout(300)
def test_killed_ranks_and_launchers_change_nothing(tmp_path: Path) -> None:
    blows = [Blow("save: a rank's file", 1, 0.5), Blow("save: commit marker", None, 0.0)]
    report = harm(Setting(2, "cpu", tmp_path), "zero 3", "harmed", blows, steps=12)
    assert report.problems == []
    assert report.starts == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(3))
def test_a_dozen_kills(tmp_path: Path, number: int) -> None:
    layout, blows = plan(seed=1, kills=12, ranks=4, a_run=4)[number]
    report = harm(Setting(4, "cpu", tmp_path), layout, "harmed", blows)
    assert report.problems == []
