"""Many tensors in one launch of a kernel: by their addresses, and a table of which program works where.

A launch for each tensor would take the host longer than the GPU works on a small one, and every fifth
parameter of a model is a vector.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1 << 16
"""Elements of one program."""
ALIGNED = 16
"""Bytes that a GPU loads at once for a thread, from an address that they divide."""


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels of our own work on a device, for what is computed in `dtype`: in float32 at the most.

    They need Triton, which comes with torch for Linux.
    """
    return device.type == "cuda" and dtype == torch.float32 and find_spec("triton") is not None


class Dealt(NamedTuple):
    """Tensors of these sizes, dealt out to programs in chunks.

    sizes   [tensors] int64: elements of each
    tensor  [programs] int32: which tensor a program works on
    chunk   [programs] int32: which chunk of it
    """

    sizes: Tensor
    tensor: Tensor
    chunk: Tensor


@lru_cache(maxsize=64)
def dealt(sizes: tuple[int, ...], device: torch.device) -> Dealt:
    """All chunks of tensors of these sizes. It is the same in every step."""
    counts = torch.tensor([-(-size // CHUNK) for size in sizes])
    tensor = torch.repeat_interleave(counts)
    chunk = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
    return Dealt(torch.tensor(sizes).to(device), tensor.int().to(device), chunk.int().to(device))


def addresses(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """[rows, tensors] int64: where each tensor begins, on their device."""
    table = torch.tensor([[tensor.data_ptr() for tensor in row] for row in rows])
    return table.to(rows[0][0].device, non_blocking=True)


def is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % ALIGNED == 0
