"""Where the file of a platform is written: a new one, or stdout."""

import sys
from pathlib import Path

from fivefold.problems import BadInput, Problem, unwritable

STDOUT = "-"


def check_writable(path: str, option: str, force: bool) -> list[Problem]:
    """Why a file cannot be written there; one that exists only by `force`."""
    if path == STDOUT:
        return []
    if not force and Path(path).is_file():
        return [Problem(option, f"'{path}' exists", "Give --force to replace it, or another name.")]
    return unwritable(path, option)


def write(path: str, text: str, option: str) -> None:
    """Write the file, or print it where `path` is `-`. Raises `BadInput`."""
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"'{path}' cannot be written: {error.strerror}"
        raise BadInput([Problem(option, message, "Choose another place.")]) from None
