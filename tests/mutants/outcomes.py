"""What is known of each bug, and which tests pass without one: on disk as soon as it is known."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.mutants.plant import Outcome
from tests.mutants.table import REPOSITORY, SOURCE, Mutant

KEPT = REPOSITORY / "build" / "mutants.json"
USUAL_S = 15.0
"""Of a bug, where none was tried yet."""


class Outcomes:
    """Kept outcomes. One counts as long as what it depends on is what it was."""

    def __init__(self, path: Path = KEPT) -> None:
        self._path = path
        known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._bugs: dict[str, dict[str, Any]] = known.get("bugs", {})
        self._green: dict[str, str] = known.get("green", {})

    def of(self, mutant: Mutant) -> Outcome | None:
        """What became of a bug; None where it was not tried, or where it, its file or its tests changed."""
        entry = self._bugs.get(mutant.name)
        if entry is None or entry["fingerprint"] != mutant.fingerprint():
            return None
        return Outcome(entry["verdict"], entry["said"], entry["seconds"])

    def keep(self, mutant: Mutant, fingerprint: str, outcome: Outcome) -> None:
        """`fingerprint`: that of the copy in which it was tried."""
        self._bugs[mutant.name] = {"fingerprint": fingerprint, **asdict(outcome)}
        self._write()

    def seconds(self, mutant: Mutant) -> float:
        """About how long a bug takes: as the last time, else as most do."""
        if mutant.name in self._bugs:
            return float(self._bugs[mutant.name]["seconds"])
        known = [float(entry["seconds"]) for entry in self._bugs.values()]
        return statistics.median(known) if known else USUAL_S

    def is_green(self, test: str) -> bool:
        """Whether a test is known to pass on the code as it is."""
        return self._green.get(test) == green_fingerprint(test)

    def keep_green(self, fingerprints: Mapping[str, str]) -> None:
        """These tests pass, on copies that had these fingerprints."""
        self._green |= fingerprints
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({"bugs": self._bugs, "green": self._green}, indent=1))
        fresh.replace(self._path)


def green_fingerprint(test: str, root: Path = REPOSITORY) -> str:
    """Changes when any source does, or the test's file."""
    digest = sha256(test.encode())
    tested = root / test.partition("::")[0]
    for file in [*sorted((root / SOURCE).rglob("*.py")), *(sorted(tested.rglob("*.py")) or [tested])]:
        digest.update(file.read_bytes())
    return digest.hexdigest()
