"""The bugs: where each is planted, what changes, and which tests should see it.

`tables/ROOM.toml` has those of one room of `src/fivefold`:

    [[mutant]]
    name = "ring-merged-in-bf16"          # what goes wrong, in a few words; once in all tables
    file = "axes/runtime/ring.py"         # under src/fivefold
    old = 'out.float()'                   # occurs once in the file
    new = 'out.bfloat16()'
    tests = ["tests/axes/test_ring.py"]   # files or node ids, fast or slow
    survives = "..."                      # only if no test can see it: why not
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = Path("src/fivefold")
TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Mutant:
    """One bug. `survives` is the reason why no test sees it, if there is one."""

    room: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str | None = None

    @property
    def path(self) -> Path:
        """The file that is changed, from the root of the repository."""
        return SOURCE / self.file

    def planted(self, text: str) -> str:
        """The file's text with the bug in it. Raises `ValueError` where the table is out of date."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: `old` occurs {text.count(self.old)} times in {self.path}, not once"
            )
        if self.old == self.new:
            raise ValueError(f"{self.name}: `new` is `old`")
        return text.replace(self.old, self.new)

    def fingerprint(self, root: Path = REPOSITORY) -> str:
        """Changes when the bug, its file or its tests do: an older outcome then says nothing."""
        digest = sha256(repr(self).encode())
        for path in (self.path, *sorted({Path(test.partition("::")[0]) for test in self.tests})):
            where = root / path
            for file in sorted(where.rglob("*.py")) if where.is_dir() else [where]:
                digest.update(file.read_bytes())
        return digest.hexdigest()


def mutants() -> list[Mutant]:
    """Every bug of every table, by room."""
    return [
        Mutant(table.stem, **{**entry, "tests": tuple(entry["tests"])})
        for table in sorted(TABLES.glob("*.toml"))
        for entry in tomllib.loads(table.read_text())["mutant"]
    ]
