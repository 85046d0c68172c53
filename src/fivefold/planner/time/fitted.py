"""The files of fitted constants that ship with the package; `fivefold backtest --fit` writes them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FittedFile:
    """Tables of constants by name; what is said about them at the top of the file stays there."""

    path: Path

    def table(self, name: str) -> dict[str, Any]:
        """One of its tables; an empty one where nothing was fitted yet."""
        found: dict[str, Any] = _read(self.path).get(name, {})
        return found

    def write(self, tables: Mapping[str, Any]) -> None:
        """Replace all its tables, and forget what was read before."""
        text = json.dumps({"about": _read(self.path).get("about", ""), **tables}, indent=1)
        self.path.write_text(text + "\n", encoding="utf-8")
        _read.cache_clear()


@cache
def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


TIME_CONSTANTS = FittedFile(Path(__file__).parent / "constants.json")
