"""Blocks of tensors, copied where they overlap: the one step that reading and writing are made of."""

import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

from fivefold.interchange.names import Link
from fivefold.storage.tensors import read_piece


def mapped(path: Path, dtype: str, shape: Sequence[int], offset: int) -> torch.Tensor:
    """A tensor over the bytes of a file. What is not looked at is not read."""
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return read_piece(content, dtype, list(shape), offset)


def as_ours(link: Link, theirs: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What a tensor of theirs holds of ours, as a view of it; and where in ours that begins."""
    view = theirs.chunk(link.parts, dim=-1)[link.place] if link.parts > 1 else theirs
    view = view.T if link.transposed else view
    if link.expert is None:
        return view, (0,) * view.dim()
    return view[None], (link.expert, *(0,) * view.dim())


def copy_overlap(
    target: torch.Tensor, at: Sequence[int], source: torch.Tensor, source_at: Sequence[int]
) -> None:
    """Copy what two blocks of one tensor have in common; `at`: where each begins in the whole."""
    for axis, (first, second) in enumerate(zip(at, source_at, strict=True)):
        start = max(first, second)
        length = min(first + target.shape[axis], second + source.shape[axis]) - start
        if length <= 0:
            return
        target = target.narrow(axis, start - first, length)
        source = source.narrow(axis, start - second, length)
    target.copy_(source)
