"""Files of tensors in the safetensors format: the length of a header, the header in JSON, then the bytes.

Written as a stream, one tensor at a time, and checksummed on the way. No torch here.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Dtype, by the format's names -> bytes of an element."""
CHUNK = 16 * 2**20
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


def laid_out(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> tuple[bytes, dict[str, Stored]]:
    """The beginning of a file with these tensors (dtype and shape), and where each of them lies in it."""
    ends, header = 0, dict[str, Any]()
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [ends, ends + size]}
        ends += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    start = 8 + len(text)
    found = {
        name: Stored(entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for name, entry in header.items()
    }
    return len(text).to_bytes(8, "little") + text, found


def write(path: Path, beginning: bytes, contents: Iterable[memoryview]) -> tuple[int, str]:
    """Write a file and bring it to the disk; its size and its SHA-256, computed beside the writing."""
    digest, size = hashlib.sha256(), 0
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        for content in (memoryview(beginning), *contents):
            for start in range(0, len(content), CHUNK):
                chunk = content[start : start + CHUNK]
                beside.submit(digest.update, chunk)
                written = 0
                while written < len(chunk):
                    written += file.write(chunk[written:]) or 0
                size += len(chunk)
        os.fsync(file.fileno())
    return size, digest.hexdigest()


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
                stored = Stored(entry["dtype"], tuple(entry["shape"]), 8 + length + first)
                if stored.bytes != last - first or not 0 <= first <= last <= size - 8 - length:
                    raise ValueError(f"'{name}' is not all in it")
                found[name] = stored
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"its header is not that of a safetensors file: {error}") from None
    return found
