"""Whether a cache on disk is still what was written: checksums of its files, chunk by chunk.

Reading gigabytes at every start takes longer than starting. So of files above `CHECKED_BYTES`, chunks that
come to about that much are compared, other ones each time.
"""

import json
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

META = "meta.json"
CHUNK = 4 << 20
CHECKED_BYTES = 4 << 30


def checksums(path: Path) -> list[int]:
    """The CRC-32 of each chunk of a file."""
    with path.open("rb") as file:
        return [zlib.crc32(chunk) for chunk in iter(lambda: file.read(CHUNK), b"")]


def write_meta(folder: Path, facts: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Leave `meta.json`: what a folder is, and how large its files are and what is in them."""
    files = {
        name: {"bytes": (folder / name).stat().st_size, "crc32": checksums(folder / name)} for name in names
    }
    meta = {**facts, "files": files}
    text = json.dumps({**meta, "crc32": _own_checksum(meta)}, indent=2) + "\n"
    (folder / META).write_text(text, encoding="utf-8")


def read_meta(folder: Path) -> dict[str, Any]:
    """What `write_meta` left. Raises `ValueError` where it is damaged, and `OSError`."""
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    if not isinstance(meta, dict) or meta.pop("crc32", None) != _own_checksum(meta):
        raise ValueError(f"{META} is not what was written")
    return meta


def damage(folder: Path, closely: bool) -> str | None:
    """What is wrong with a folder that `write_meta` described; None where nothing is found.

    closely  compare checksums, not sizes alone
    """
    try:
        for name, written in read_meta(folder)["files"].items():
            path = folder / name
            if path.stat().st_size != written["bytes"]:
                return f"{name} has {path.stat().st_size:,} bytes, not {written['bytes']:,}"
            if closely and not _equal(path, written["crc32"]):
                return f"{name} is not what was written"
    except OSError as error:
        return f"{Path(error.filename or META).name}: {error.strerror}"
    except ValueError:  # also what is not UTF-8, or not JSON
        return f"{META} is not what was written"
    return None


def _equal(path: Path, expected: list[int]) -> bool:
    """Whether the chunks of a file, or as many as there is time for, have these checksums."""
    numbers = range(len(expected))
    most = CHECKED_BYTES // CHUNK
    chosen = numbers if len(expected) <= most else sorted(random.sample(numbers, most))
    with path.open("rb") as file:
        for number in chosen:
            file.seek(number * CHUNK)
            if zlib.crc32(file.read(CHUNK)) != expected[number]:
                return False
    return True


def _own_checksum(meta: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())
