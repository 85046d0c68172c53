"""Pictures that cannot be drawn are refused before the work that they are to show."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.report.figures import undrawable


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("times", "'times' has no ending that says in which format"),
        ("times.xyz", "Name a file that ends in .png, .svg or .pdf."),
        ("/nowhere/times.png", "there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_drawn(path: str, why: str) -> None:
    (problem,) = undrawable(path)
    assert problem.key == "--png"
    assert why in str(problem)


def test_what_can_be_drawn(tmp_path: Path) -> None:
    assert undrawable(None) == []
    assert undrawable(str(tmp_path / "times.SVG")) == []
