"""Files of tensors in the safetensors format: the length of a header, the header in JSON, then the bytes.

Written as a stream, one tensor at a time, and checksummed on the way. No torch here.
"""

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Dtype, by the format's names -> bytes of an element."""
CHUNK = 16 * 2**20
THREADS = 4
"""That compute checksums: one computes one or two gigabytes a second, and disks may write more."""
ALIGNED = 64
LONGEST_HEADER = 100_000_000


class Stored(NamedTuple):
    """One tensor of a file; `offset`: of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]


def laid_out(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Stored]]:
    """The beginning of a file with these tensors (dtype and shape), and where each of them lies in it.

    metadata  what else the header is to say
    """
    ends, header = 0, dict[str, Any]()
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [ends, ends + size]}
        ends += size
    noted = {"__metadata__": dict(metadata)} if metadata else {}
    text = json.dumps(noted | header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    start = 8 + len(text)
    found = {
        name: Stored(entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for name, entry in header.items()
    }
    return len(text).to_bytes(8, "little") + text, found


def write(path: Path, beginning: bytes, contents: Iterable[memoryview]) -> tuple[int, str]:
    """Write a file and bring it to the disk; its size and its checksum, computed beside the writing."""
    digests, size = deque[Future[bytes]](), 0
    checksum = hashlib.sha256()
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(THREADS) as beside:
        for chunk in _chunks(chain([memoryview(beginning)], contents)):
            digests.append(beside.submit(_digest, chunk))
            for view in chunk:
                written = 0
                while written < len(view):
                    written += file.write(view[written:]) or 0
                size += len(view)
            if len(digests) > THREADS:  # so that few chunks wait in memory
                checksum.update(digests.popleft().result())
        os.fsync(file.fileno())
        for digest in digests:
            checksum.update(digest.result())
    return size, checksum.hexdigest()


def file_checksum(path: Path) -> str:
    """The SHA-256 of the SHA-256s of a file's chunks of 16 MiB: they can be computed side by side."""
    checksum = hashlib.sha256()
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(THREADS) as beside:
        starts = range(0, path.stat().st_size, CHUNK)
        for digest in beside.map(lambda start: _digest([os.pread(file.fileno(), CHUNK, start)]), starts):
            checksum.update(digest)
    return checksum.hexdigest()


def _chunks(contents: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in lists of views that have `CHUNK` bytes together, the last one perhaps fewer."""
    views, room = list[memoryview](), CHUNK
    for content in contents:
        while len(content):
            views.append(content[:room])
            content = content[room:]
            room -= len(views[-1])
            if not room:
                yield views
                views, room = [], CHUNK
    if views:
        yield views


def _digest(views: Iterable[memoryview | bytes]) -> bytes:
    found = hashlib.sha256()
    for view in views:
        found.update(view)
    return found.digest()


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file. Raises `ValueError` where it is not such a file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(LONGEST_HEADER, size - 8):
            raise ValueError("it does not begin like a safetensors file")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            found = {}
            for name, entry in header.items():
                first, last = entry["data_offsets"]
                if not all(type(number) is int and number >= 0 for number in (first, last, *entry["shape"])):
                    raise ValueError(f"'{name}' has sizes that are no whole numbers")
                if entry["dtype"] not in WIDTHS:
                    raise ValueError(f"'{name}' has dtype {entry['dtype']!r}, which is not known")
                stored = Stored(entry["dtype"], tuple(entry["shape"]), 8 + length + first)
                if stored.bytes != last - first or not 0 <= first <= last <= size - 8 - length:
                    raise ValueError(f"'{name}' is not all in it")
                found[name] = stored
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"its header is not that of a safetensors file: {error}") from None
    return found
