"""Writes the table of keys into jobs.md, between its two markers.

    python docs/make_keys.py

The table comes from the same place as `fivefold keys`: the fields of the job's sections.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from fivefold.config import list_keys

PAGE = Path(__file__).with_name("jobs.md")
START, END = "<!-- keys: made by make_keys.py -->", "<!-- end of keys -->"


def shown(value: object) -> str:
    """A default as one writes it in TOML; empty when there is none, or the meaning says it."""
    if value is None:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def table() -> str:
    """One table a section."""
    parts = []
    for section, keys in groupby(list_keys(), key=lambda key: key.name.partition(".")[0]):
        rows = [
            f"| `{key.name}` | {shown(key.default)} | {key.allowed} | {key.description} |" for key in keys
        ]
        parts.append(
            "\n".join(
                [f"### {section}", "", "| key | default | allowed | meaning |", "|---|---|---|---|", *rows]
            )
        )
    return "\n\n".join(parts)


def with_table(page: str) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
