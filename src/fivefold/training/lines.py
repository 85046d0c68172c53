"""Files of one JSON object a line, to which runs append: they survive a kill in the middle of a line."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class LineFile:
    """Appends to a file. Each line reaches it in one write; what a killed run left of a line is closed off.

    On a full disk lines wait in memory until there is room.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        # A killed run's half line must not swallow our first.
        self._waiting = b"\n" if _is_torn(path) else b""

    def write(self, record: Record) -> None:
        self._waiting += (json.dumps(record, allow_nan=False) + "\n").encode()
        self._flush()

    def sync(self) -> None:
        """Bring what was written to the disk."""
        self._flush()
        with room_or_later():
            os.fsync(self._file)

    def close(self) -> None:
        self._flush()
        os.close(self._file)

    def _flush(self) -> None:
        with room_or_later():
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]


@contextmanager
def room_or_later() -> Iterator[None]:
    """A full disk is no error: what could not be written is tried again."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def read_lines(path: Path) -> list[Record]:
    """The objects in a file that count a `step`; none where there is no file. Half lines are skipped."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append(record)
    return found


def _is_torn(path: Path) -> bool:
    """Whether the file's last line was not finished."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
