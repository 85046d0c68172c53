"""Runs the examples of docs/python.md in order and writes what they print below them.

.venv/bin/python -m docs.make_python
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).with_name("python.md")
EXAMPLE = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", flags=re.DOTALL)
END = "--- end of example ---"
# Read from the command line, so that ranks have no script to import; in one namespace, as in a notebook.
RUN = f"""
import json, sys
for example in json.loads(sys.argv[1]):
    exec(example, globals())
    print({END!r}, flush=True)
"""


def examples(page: str) -> list[tuple[str, str]]:
    """Each example of the page, and what stands below it as its output."""
    return EXAMPLE.findall(page)


def printed(sources: list[str]) -> list[str]:
    """What each example prints."""
    command = [sys.executable, "-c", RUN, json.dumps(sources)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.split(f"{END}\n")[:-1]


def with_outputs(page: str) -> str:
    """The page with the output of every example."""
    outputs = iter(printed([source for source, _ in examples(page)]))
    return EXAMPLE.sub(lambda found: f"```python\n{found[1]}```\n\n```text\n{next(outputs)}```", page)


if __name__ == "__main__":
    PAGE.write_text(with_outputs(PAGE.read_text()))
