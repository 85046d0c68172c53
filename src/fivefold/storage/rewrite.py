"""A checkpoint written anew in other pieces. No torch here, and no more in memory than a piece or two."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fivefold.storage.folder import begin, commit
from fivefold.storage.manifest import File, Manifest, Piece, Tensor, piece_name
from fivefold.storage.safetensors import WIDTHS, laid_out, write


class Cut(NamedTuple):
    """A block of a tensor, and the file that it is to be in."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str


def rewrite(
    source: Path, manifest: Manifest, cuts: Mapping[str, Sequence[Cut]], job: str, run: Path
) -> Manifest:
    """Write what the checkpoint in `source` holds as one of `run`, each tensor cut as `cuts` says.

    It is whole or not there at all, like any other.
    """
    partial = begin(run, manifest.step)
    files: dict[str, File] = {}
    pieces: dict[str, list[Piece]] = {name: [] for name in manifest.tensors}
    for file in sorted({cut.file for some in cuts.values() for cut in some}):
        here = {
            piece_name(name, cut.start): (name, cut)
            for name, some in cuts.items()
            for cut in some
            if cut.file == file
        }
        kinds = {key: (manifest.tensors[name].dtype, cut.shape) for key, (name, cut) in here.items()}
        beginning, stored = laid_out(kinds)
        contents = (_block(source, manifest.tensors[name], cut) for name, cut in here.values())
        size, checksum = write(partial / file, beginning, contents)
        files[file] = File(bytes=size, checksum=checksum)
        for key, (name, cut) in here.items():
            piece = Piece(start=list(cut.start), shape=list(cut.shape), file=file, offset=stored[key].offset)
            pieces[name].append(piece)
    tensors = {
        name: Tensor(shape=tensor.shape, dtype=tensor.dtype, pieces=pieces[name])
        for name, tensor in manifest.tensors.items()
    }
    written = manifest.model_copy(update={"job": job, "tensors": tensors, "files": files})
    commit(run, written)
    return written


def _block(source: Path, tensor: Tensor, cut: Cut) -> memoryview:
    """The bytes of a block, put together from the pieces that it lies in."""
    kind = np.dtype(f"u{WIDTHS[tensor.dtype]}")
    found = np.empty(cut.shape, kind)
    for piece in tensor.pieces:
        there, here = zip(*_overlap(piece, cut), strict=True) if cut.shape else ((), ())
        if all(each.stop > each.start for each in there):
            stored: Any = np.memmap(source / piece.file, kind, "r", piece.offset, tuple(piece.shape))
            found[here] = stored[there]
    return found.reshape(-1).view("u1").data


def _overlap(piece: Piece, cut: Cut) -> Iterator[tuple[slice, slice]]:
    """Along each dimension, what both have: counted from the piece's beginning, and from the block's."""
    for old, old_size, new, new_size in zip(piece.start, piece.shape, cut.start, cut.shape, strict=True):
        first, last = max(old, new), min(old + old_size, new + new_size)
        yield slice(first - old, last - old), slice(first - new, last - new)
