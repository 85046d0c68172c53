"""Which files a source is, and a name for what is in them.

A source is `stdlib` (the Python files of the running interpreter's standard library: about 30 MB of
real text on every machine), a file, a folder, or a glob.
"""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fivefold.data.documents import Piece, pieces_of
from fivefold.problems import BadInput, Problem

STDLIB = "stdlib"
RANDOM = "random"
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "lib-dynload", "__pycache__"})

HASHED_WHOLE = 16 << 20
HASHED_ENDS = 1 << 20


@dataclass(frozen=True)
class Source:
    """The files of a source, in the order they are read."""

    name: str
    files: tuple[Path, ...]
    text_field: str
    skip_undecodable: bool = False

    def pieces(self) -> list[Piece]:
        """All there is to read, in order."""
        return [
            piece for path in self.files for piece in pieces_of(path, self.text_field, self.skip_undecodable)
        ]

    def content_key(self) -> str:
        """A hash over what the files hold and how they are read, not over where they are."""
        digest = hashlib.blake2b(f"{self.text_field}\0{self.skip_undecodable}".encode(), digest_size=16)
        for path in self.files:
            digest.update(f"\0{path.suffix.lower()}\0".encode())
            try:
                digest.update(_file_digest(path))
            except OSError as error:
                problem = Problem("data.source", f"{path} cannot be read: {error.strerror}")
                raise BadInput([problem]) from None
        return digest.hexdigest()


def find_source(name: str, text_field: str) -> Source:
    """The files that `name` stands for, sorted by path.

    A folder stands for every file below it, less hidden ones (a leading dot) and `__pycache__`; a glob
    for the files and folders it matches. Raises `BadInput` when there is nothing.
    """
    if name == STDLIB:
        return _stdlib()
    path = Path(name).expanduser()
    if name and path.exists():
        matches = [path]
    else:
        matches = [Path(match) for match in glob.glob(str(path), recursive=True) if name]
        if not matches:
            raise BadInput([_nothing_there(name, path)])
    files = sorted({file for match in matches for file in _files_below(match)})
    if not files:
        raise BadInput([Problem("data.source", f"'{name}' holds no files", "Name a folder with text in it.")])
    return Source(name, tuple(files), text_field)


def _stdlib() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in _files_below(root, NOT_STDLIB) if file.suffix == ".py")
    if not files:
        raise BadInput(
            [
                Problem(
                    "data.source",
                    f"'{STDLIB}': this Python keeps no source files in {root}",
                    "Name a file or folder of text instead.",
                )
            ]
        )
    # Some of its tests are files in other encodings, on purpose.
    return Source(STDLIB, tuple(files), "", skip_undecodable=True)


def _files_below(path: Path, left_out: frozenset[str] = frozenset({"__pycache__"})) -> Iterable[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _nothing_there(name: str, path: Path) -> Problem:
    allowed = f"Allowed: {STDLIB}, {RANDOM}, a file, a folder or a glob."
    if glob.has_magic(name):
        return Problem("data.source", f"no file matches '{name}' (from {Path.cwd()})", allowed)
    return Problem("data.source", f"'{name}' does not exist ({path.absolute()})", allowed)


def _file_digest(path: Path) -> bytes:
    """A hash of the content; of a file over 16 MiB: size, time of change, first and last MiB."""
    stat = path.stat()
    digest = hashlib.blake2b(f"{stat.st_size}\0".encode(), digest_size=16)
    with path.open("rb") as file:
        if stat.st_size <= HASHED_WHOLE:
            digest.update(file.read())
        else:
            digest.update(f"{stat.st_mtime_ns}\0".encode())
            digest.update(file.read(HASHED_ENDS))
            file.seek(-HASHED_ENDS, os.SEEK_END)
            digest.update(file.read())
    return digest.digest()
