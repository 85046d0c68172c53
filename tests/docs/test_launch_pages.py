"""What the pages on launching print is what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.commands.typed import typed

ROOT = Path(__file__).parents[2]
PLATFORMS = ("slurm", "kubernetes", "skypilot")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_file_that_is_shown_is_the_one_that_is_written(platform, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / f"launch-{platform}.md").read_text()
    [block] = re.findall(r"```console\n\$ fivefold (.*?)```", text, flags=re.DOTALL)
    command, shown = re.split(r"(?<!\\)\n", block, maxsplit=1)
    ended = typed(*shlex.split(command.replace("\\\n", " ")))
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout == shown
