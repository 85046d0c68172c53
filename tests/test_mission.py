"""docs/mission.md, the page of what the texts say, names tests that exist: `test_texts.py` of each room."""

from __future__ import annotations

import re
from pathlib import Path


def test_every_test_that_the_page_names_exists():
    root = Path(__file__).parent
    known = "\n".join(path.read_text() for path in root.rglob("test_*.py"))
    named = set(re.findall(r"\btest_\w+(?!\w*\.py)", (root.parent / "docs" / "mission.md").read_text()))
    files = {path.stem for path in root.rglob("test_*.py")}
    assert {name for name in named - files if f"def {name}(" not in known} == set()
