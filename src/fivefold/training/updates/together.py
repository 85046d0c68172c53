"""AdamW of `operations.py` with moments in float32, of many parameters in one launch.

It computes the same bits: see `kernels.py`. What is alike in all that a launch updates (whether it decays,
the dtype of gradients) is told once.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.training.launches import CHUNK, addresses, dealt, is_aligned
from fivefold.training.updates.kernels import moved
from fivefold.training.updates.operations import Numbers, Operands

BLOCK = 1024


def adamw(updates: Sequence[tuple[Operands, Numbers]], scale: Tensor | None) -> None:
    """As `operations.adamw` of each, all moments in float32."""
    groups: dict[tuple[Any, ...], list[list[Tensor]]] = defaultdict(list)
    for operands, numbers in updates:
        gradient, master, moments, copy = operands
        if not master.numel():
            continue
        written = [master, *moments, *([] if copy is None else [copy])]
        if not all(each.is_contiguous() for each in written):
            raise ValueError("the kernel walks through tensors in one run")
        column = [gradient.contiguous(), *written]
        dtypes = tuple(each.dtype for each in column)
        groups[numbers, dtypes, all(is_aligned(each) for each in column)].append(column)
    for (numbers, _, aligned), columns in groups.items():
        first = columns[0]
        device = first[0].device
        parts = dealt(tuple(column[1].numel() for column in columns), device)
        one = torch.ones((), dtype=torch.float32, device=device) if scale is None else scale.float()
        _adamw[(len(parts.tensor),)](
            first[0],
            first[-1],
            addresses(list(zip(*columns, strict=True))),
            *parts,
            len(columns),
            one,
            *numbers,
            COPIES=len(first) == 5,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            ALIGNED=aligned,
            enable_fp_fusion=False,
        )


@triton.jit
def _begin(table, row, start, like, ALIGNED: tl.constexpr):  # noqa: N803
    """Where this chunk begins of the tensor at this place of the table, of numbers like `like`'s."""
    begin = tl.load(table + row).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
    return begin + start


@triton.jit(do_not_specialize=["count"])
def _adamw(
    gradients,
    copies,
    table,
    sizes,
    tensors,
    chunks,
    count,
    scale,
    keep,
    share,
    keep_square,
    share_square,
    root,
    eps,
    size,
    COPIES: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0)
    number = tl.load(tensors + program)
    start = tl.load(chunks + program).to(tl.int64) * CHUNK
    left = tl.minimum(tl.load(sizes + number) - start, CHUNK).to(tl.int32)
    gradient = _begin(table, number, start, gradients, ALIGNED)
    master = _begin(table, number + count, start, scale, ALIGNED)
    moment = _begin(table, number + 2 * count, start, scale, ALIGNED)
    square = _begin(table, number + 3 * count, start, scale, ALIGNED)
    copy = _begin(table, number + 4 * count, start, copies, ALIGNED) if COPIES else master
    factor = tl.load(scale)
    columns = tl.arange(0, BLOCK)
    for block in range(0, left // BLOCK):  # without a mask, which would have them loaded one by one
        here = block * BLOCK + columns
        g = tl.load(gradient + here).to(tl.float32) * factor
        w, m, v = tl.load(master + here), tl.load(moment + here), tl.load(square + here)
        w, m, v = moved(g, w, m, v, keep, share, keep_square, share_square, root, eps, size)
        tl.store(master + here, w)
        tl.store(moment + here, m)
        tl.store(square + here, v)
        if COPIES:
            tl.store(copy + here, w.to(copy.dtype.element_ty))
    here = left // BLOCK * BLOCK + columns
    there = here < left
    g = tl.load(gradient + here, mask=there, other=0).to(tl.float32) * factor
    w, m = tl.load(master + here, mask=there, other=0), tl.load(moment + here, mask=there, other=0)
    v = tl.load(square + here, mask=there, other=0)
    w, m, v = moved(g, w, m, v, keep, share, keep_square, share_square, root, eps, size)
    tl.store(master + here, w, mask=there)
    tl.store(moment + here, m, mask=there)
    tl.store(square + here, v, mask=there)
    if COPIES:
        tl.store(copy + here, w.to(copy.dtype.element_ty), mask=there)
