"""What a checkpoint holds, in a plain format: reading it runs nothing that is in it.

`manifest.json` lists every tensor with its pieces, every file with its size and checksum, and how far the run
had come. `COMMIT` has the checksum of the manifest and is written last: without it, or with another one, the
folder is no checkpoint. No torch here: whoever lists or verifies checkpoints need not wait for it.
"""

import hashlib
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fivefold.storage.safetensors import WIDTHS

FORMAT = 1
MANIFEST, COMMIT, PREFIX = "manifest.json", "COMMIT", "step-"

Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[\w][\w.-]*$")]
"""Of a file inside the checkpoint's folder, and never outside of it."""


def file_name(rank: int) -> str:
    """Of what a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def piece_name(tensor: str, start: Sequence[int]) -> str:
    """What a piece is called in the file that it is in."""
    return f"{tensor}@{tuple(start)}"


class DamagedError(Exception):
    """A checkpoint that cannot be trusted, and why."""


class OtherFormatError(DamagedError):
    """A checkpoint that another version of fivefold has written in another format."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")


class Piece(_Strict):
    """A block of a tensor: its first element in the whole, its shape, and where its bytes begin in a file."""

    start: list[Count]
    shape: list[Count]
    file: Name
    offset: Count


class Tensor(_Strict):
    """A whole tensor, and the pieces that it was written in."""

    shape: list[Count]
    dtype: str
    pieces: list[Piece]

    @model_validator(mode="after")
    def _pieces_are_the_whole(self) -> Self:
        if self.dtype not in WIDTHS:
            raise ValueError(f"dtype '{self.dtype}' is not known")
        for piece in self.pieces:
            ends = [start + size for start, size in zip(piece.start, piece.shape, strict=True)]
            if len(ends) != len(self.shape) or any(e > n for e, n in zip(ends, self.shape, strict=True)):
                raise ValueError(f"a piece of {piece.shape} at {piece.start} is not inside {self.shape}")
        if sum(math.prod(piece.shape) for piece in self.pieces) != math.prod(self.shape):
            raise ValueError("its pieces are not all of it")
        return self


class File(_Strict):
    """Size and checksum (`safetensors.file_checksum`) of one file."""

    bytes: Count
    checksum: str


class Manifest(_Strict):
    """A checkpoint.

    versions  of fivefold and torch that wrote it
    job       the job that was trained, as TOML
    data      a fingerprint of the data, by source
    progress  how far the run had come: `training.checkpoint.Progress`
    """

    format: int = FORMAT
    step: Count
    versions: dict[str, str]
    job: str
    data: dict[str, str]
    progress: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[Name, File]

    @model_validator(mode="after")
    def _pieces_are_in_files(self) -> Self:
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                file = self.files.get(piece.file)
                end = piece.offset + math.prod(piece.shape) * WIDTHS[tensor.dtype]
                if file is None or end > file.bytes:
                    raise ValueError(f"'{name}' has a piece that is not in '{piece.file}'")
        return self

    @property
    def only_weights(self) -> bool:
        """Whether it has weights that no run has trained yet: there is no state of an optimizer in it."""
        return self.step == 0 and all(name.startswith("model.") for name in self.tensors)

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.bytes for file in self.files.values())


def manifest_text(manifest: Manifest) -> bytes:
    return manifest.model_dump_json(indent=None).encode()


def commit_text(manifest: bytes) -> bytes:
    """As `sha256sum` has it."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


class _Versioned(BaseModel):
    """What every format has."""

    format: int
    versions: dict[str, str] = {}


def _refuse_other_format(content: bytes) -> None:
    """Before anything else is read: another format may have other keys. Raises `OtherFormatError`."""
    with suppress(ValidationError):
        found = _Versioned.model_validate_json(content, strict=True)
        if found.format != FORMAT:
            by = found.versions.get("fivefold", "(which version it does not say)")
            told = f"fivefold {by} has written it in format {found.format}"
            raise OtherFormatError(f"{told}, and this version reads format {FORMAT}")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder. Raises `DamagedError`."""
    try:
        content, commit = (folder / MANIFEST).read_bytes(), (folder / COMMIT).read_bytes()
    except OSError as error:
        raise DamagedError(f"{Path(error.filename).name} cannot be read: {error.strerror}") from None
    if commit != commit_text(content):
        raise DamagedError(f"{MANIFEST} is not the one that {COMMIT} has the checksum of")
    _refuse_other_format(content)
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DamagedError(f"{MANIFEST}{': ' + where if where else ''}: {first['msg']}") from None
    if folder.name != f"{PREFIX}{manifest.step}":
        raise DamagedError(f"{MANIFEST} is that of step {manifest.step}")
    return manifest
