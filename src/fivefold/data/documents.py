"""From files to documents: what a text, JSONL or Parquet file holds.

A file is read in pieces, each a job for one process: a text file whole (it is one document), a JSONL
file by ranges of bytes, a Parquet file by row groups. Documents come in the order they have in the
file, whatever the pieces. Documents without text are left out.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.problems import BadInput, Problem

PIECE_BYTES = 4 << 20
BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class Piece:
    """A part of a file.

    start, stop       bytes of a JSONL file (lines that begin there), row groups of a Parquet file;
                      a text file is one piece
    bytes             about how much there is to read
    skip_undecodable  leave out a file that is not UTF-8 instead of refusing it
    """

    path: Path
    text_field: str
    start: int
    stop: int
    bytes: int
    skip_undecodable: bool = False


def pieces_of(path: Path, text_field: str, skip_undecodable: bool = False) -> list[Piece]:
    """All pieces of a file, in order. Raises `BadInput` for a Parquet file without the text column."""
    size = path.stat().st_size
    match path.suffix.lower():
        case ".jsonl":
            starts = range(0, size, PIECE_BYTES)
            return [
                Piece(path, text_field, start, min(start + PIECE_BYTES, size), min(PIECE_BYTES, size - start))
                for start in starts
            ]
        case ".parquet":
            metadata = _open_parquet(path, text_field).metadata
            groups = range(metadata.num_row_groups)
            return [Piece(path, text_field, i, i + 1, size // len(groups)) for i in groups]
        case _:
            return [Piece(path, text_field, 0, size, size, skip_undecodable)]


def read(piece: Piece) -> Iterator[str]:
    """The documents of a piece. Raises `BadInput` that names the file and the place in it."""
    match piece.path.suffix.lower():
        case ".jsonl":
            documents = _read_jsonl(piece)
        case ".parquet":
            documents = _read_parquet(piece)
        case _:
            documents = _read_text(piece)
    return (document for document in documents if document)


def _read_text(piece: Piece) -> Iterator[str]:
    raw = piece.path.read_bytes()
    try:
        yield _decode(raw, piece.path, 0).removeprefix(BYTE_ORDER_MARK)
    except BadInput:
        if not piece.skip_undecodable:
            raise


def _read_jsonl(piece: Piece) -> Iterator[str]:
    with piece.path.open("rb") as file:
        if piece.start:
            # A line belongs to the piece it begins in: skip the rest of one begun before.
            file.seek(piece.start - 1)
            file.readline()
        while (at := file.tell()) < piece.stop:
            raw = file.readline()
            if raw.strip():
                yield _text_of_line(raw, at, piece)


def _text_of_line(raw: bytes, at: int, piece: Piece) -> str:
    line = _decode(raw, piece.path, at)
    if at == 0:
        line = line.removeprefix(BYTE_ORDER_MARK)
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _bad_line(piece, at, f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict):
        raise _bad_line(piece, at, f"a JSON object was expected, not {_kind(record)}")
    if piece.text_field not in record:
        raise _bad_line(
            piece,
            at,
            f"no field '{piece.text_field}'",
            f"Fields here: {', '.join(record) or 'none'}. Name the one with the text in data.text_field.",
        )
    text = record[piece.text_field]
    if not isinstance(text, str):
        raise _bad_line(piece, at, f"field '{piece.text_field}' must be a string, not {_kind(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _bad_line(piece, at, f"field '{piece.text_field}' holds half of a surrogate pair") from None
    return text


def _read_parquet(piece: Piece) -> Iterator[str]:
    file = _open_parquet(piece.path, piece.text_field)
    for group in range(piece.start, piece.stop):
        try:
            texts = file.read_row_group(group, columns=[piece.text_field]).column(0).to_pylist()
        except (OSError, ValueError) as error:
            raise _bad_source(f"{piece.path}, row group {group}: cannot be read: {error}") from None
        for row, text in enumerate(texts):
            if text is None:
                before = sum(file.metadata.row_group(earlier).num_rows for earlier in range(group))
                raise _bad_source(
                    f"{piece.path}, row {before + row} (from 0): column '{piece.text_field}' is null",
                    "Leave out the rows without text.",
                )
            yield text


def _open_parquet(path: Path, text_field: str) -> Any:
    """The file as a `pyarrow.parquet.ParquetFile`, once its text column is known to be there."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise _bad_source(f"{path} is not a Parquet file: {error}") from None
    schema = file.schema_arrow
    if text_field not in schema.names:
        raise _bad_source(
            f"{path} has no column '{text_field}'",
            f"Columns: {', '.join(schema.names) or 'none'}. Name the one with the text in data.text_field.",
        )
    kind = schema.field(text_field).type
    values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not (pyarrow.types.is_string(values) or pyarrow.types.is_large_string(values)):
        raise _bad_source(f"{path}: column '{text_field}' must hold strings, not {kind}")
    return file


def _decode(raw: bytes, path: Path, at: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad_source(
            f"{path} is not UTF-8: byte {at + error.start} is 0x{raw[error.start]:02x} ({error.reason})",
            "Convert the file to UTF-8, or leave it out (a glob such as 'folder/**/*.txt' picks files).",
        ) from None


def _bad_line(piece: Piece, at: int, message: str, hint: str = "") -> BadInput:
    with piece.path.open("rb") as file:
        line = file.read(at).count(b"\n") + 1
    return _bad_source(f"{piece.path}:{line}: {message}", hint)


def _bad_source(message: str, hint: str = "") -> BadInput:
    return BadInput([Problem("data.source", message, hint)])


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
