"""Sums of squares on a GPU: all gradients are read once, in their own width, in one launch for each dtype.

Each program adds up the squares of its chunk, alike in any width, and those sums are added up in a fixed
order: no bit depends on which program is done first.
"""

from collections import defaultdict

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.training.launches import CHUNK, addresses, dealt, is_aligned

BLOCK = 1024


def sum_of_squares(tensors: list[Tensor], shares: Tensor | None) -> Tensor:
    """Of all elements, a float64 scalar. Squares are float32's: those that overflow are infinite.

    shares  [tensors] float64: what the sum of each tensor's is multiplied by
    """
    groups: dict[tuple[torch.dtype, bool], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            groups[tensor.dtype, is_aligned(tensor)].append(index)
    device = tensors[0].device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (_, aligned), members in groups.items():
        some = [tensors[index].contiguous() for index in members]
        parts = dealt(tuple(tensor.numel() for tensor in some), device)
        sums = torch.empty(len(parts.tensor), dtype=torch.float64, device=device)
        table = addresses([some])
        _squares[(len(sums),)](
            some[0], table, *parts, sums, CHUNK=CHUNK, BLOCK=BLOCK, ALIGNED=aligned, enable_fp_fusion=False
        )
        if shares is not None:
            chosen = torch.tensor(members).to(device, non_blocking=True)
            sums *= shares[chosen][parts.tensor]
        total += sums.sum()
    return total


@triton.jit
def _squares(
    like,
    table,
    sizes,
    tensors,
    chunks,
    sums,
    CHUNK: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0)
    number = tl.load(tensors + program)
    start = tl.load(chunks + program).to(tl.int64) * CHUNK
    size = tl.minimum(tl.load(sizes + number) - start, CHUNK).to(tl.int32)
    begin = tl.load(table + number).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
    begin += start
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    whole = size // BLOCK
    for block in range(0, whole):  # without a mask, which would have them loaded one by one
        x = tl.load(begin + block * BLOCK + columns).to(tl.float32)
        total += x * x
    rest = whole * BLOCK + columns
    x = tl.load(begin + rest, mask=rest < size, other=0).to(tl.float32)
    total += x * x
    tl.store(sums + program, tl.sum(total.to(tl.float64)))
