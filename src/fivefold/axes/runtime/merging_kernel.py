"""Parts of `merging.py` put together by a kernel of a GPU: each is read once, and the result written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.axes.runtime.merging import Part

SLOTS = 4
"""For as many parts there are arguments."""

ROWS = 16
"""Queries of one head that a program takes."""


def put_together(parts: list[Part], out: Tensor) -> Tensor | None:
    """As `merging.by_torch`, for at most `BLOCKS_AT_ONCE` parts of float32 or narrower."""
    assert len(parts) <= SLOTS
    rows, heads, queries, width = out.shape
    weighed = parts[0].lse is not None
    total = out.new_empty(out.shape[:-1], dtype=torch.float32) if weighed else None
    given = []
    for part in (*parts, *[parts[0]] * (SLOTS - len(parts))):
        lse = part.value if part.lse is None else part.lse
        if part.lse is not None and not lse.is_contiguous():
            raise ValueError("the kernel walks through a log-sum-exp in one run")
        given += [part.value, lse, part.first, *part.value.stride()[:3]]
    if any(part.value.stride(3) != 1 for part in parts) or out.stride(3) != 1:
        raise ValueError("the kernel reads and writes a head's numbers in one run")
    _put_together[(rows * heads * triton.cdiv(queries, ROWS),)](
        out,
        out if total is None else total,
        *out.stride()[:3],
        heads,
        queries,
        width,
        *given,
        PARTS=len(parts),
        WEIGHED=weighed,
        ROWS=ROWS,
        WIDTH=triton.next_power_of_2(width),
    )
    return total


@triton.jit
def _weight(lse, first, row, query, queries, there):
    """The log-sum-exps of a part; minus infinity where it has none."""
    seen = there & (query >= first)
    return tl.load(lse + row * (queries - first) + query - first, mask=seen, other=float("-inf"))


@triton.jit
def _share(
    total,
    value,
    lse,
    first,
    batch_apart,
    head_apart,
    query_apart,
    batch,
    head,
    row,
    query,
    column,
    queries,
    there,
    width,
    WEIGHED: tl.constexpr,  # noqa: N803
):
    """What a part adds to the result."""
    seen = there & (query >= first)
    if WEIGHED:
        weight = tl.exp(_weight(lse, first, row, query, queries, there) - total)
        seen = seen & (weight > 0)  # nothing is read of what does not count
    place = batch * batch_apart + head * head_apart + (query - first) * query_apart
    mask = seen[:, None] & (column < width)[None, :]
    found = tl.load(value + place[:, None] + column[None, :], mask=mask, other=0).to(tl.float32)
    if WEIGHED:
        found = found * weight[:, None]
    return found


@triton.jit
def _put_together(
    out,
    out_lse,
    out_batch_apart,
    out_head_apart,
    out_query_apart,
    heads,
    queries,
    width,
    value_0,
    lse_0,
    first_0,
    batch_apart_0,
    head_apart_0,
    query_apart_0,
    value_1,
    lse_1,
    first_1,
    batch_apart_1,
    head_apart_1,
    query_apart_1,
    value_2,
    lse_2,
    first_2,
    batch_apart_2,
    head_apart_2,
    query_apart_2,
    value_3,
    lse_3,
    first_3,
    batch_apart_3,
    head_apart_3,
    query_apart_3,
    PARTS: tl.constexpr,  # noqa: N803
    WEIGHED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(queries, ROWS)
    row = program // blocks  # of the log-sum-exp: a head of a sequence
    batch, head = row // heads, row % heads
    query = (program % blocks) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = query < queries

    total = tl.zeros((ROWS,), tl.float32)
    if WEIGHED:
        weight_0 = _weight(lse_0, first_0, row, query, queries, there)
        largest = weight_0
        if PARTS > 1:
            weight_1 = _weight(lse_1, first_1, row, query, queries, there)
            largest = tl.maximum(largest, weight_1)
        if PARTS > 2:
            weight_2 = _weight(lse_2, first_2, row, query, queries, there)
            largest = tl.maximum(largest, weight_2)
        if PARTS > 3:
            weight_3 = _weight(lse_3, first_3, row, query, queries, there)
            largest = tl.maximum(largest, weight_3)
        largest = tl.where(there, largest, 0.0)
        total = tl.exp(weight_0 - largest)
        if PARTS > 1:
            total += tl.exp(weight_1 - largest)
        if PARTS > 2:
            total += tl.exp(weight_2 - largest)
        if PARTS > 3:
            total += tl.exp(weight_3 - largest)
        total = tl.where(there, largest + tl.log(tl.where(there, total, 1.0)), 0.0)
        tl.store(out_lse + row * queries + query, total, mask=there)

    found = _share(
        total,
        value_0,
        lse_0,
        first_0,
        batch_apart_0,
        head_apart_0,
        query_apart_0,
        batch,
        head,
        row,
        query,
        column,
        queries,
        there,
        width,
        WEIGHED,
    )
    if PARTS > 1:
        found += _share(
            total,
            value_1,
            lse_1,
            first_1,
            batch_apart_1,
            head_apart_1,
            query_apart_1,
            batch,
            head,
            row,
            query,
            column,
            queries,
            there,
            width,
            WEIGHED,
        )
    if PARTS > 2:
        found += _share(
            total,
            value_2,
            lse_2,
            first_2,
            batch_apart_2,
            head_apart_2,
            query_apart_2,
            batch,
            head,
            row,
            query,
            column,
            queries,
            there,
            width,
            WEIGHED,
        )
    if PARTS > 3:
        found += _share(
            total,
            value_3,
            lse_3,
            first_3,
            batch_apart_3,
            head_apart_3,
            query_apart_3,
            batch,
            head,
            row,
            query,
            column,
            queries,
            there,
            width,
            WEIGHED,
        )

    place = batch * out_batch_apart + head * out_head_apart + query * out_query_apart
    mask = there[:, None] & (column < width)[None, :]
    tl.store(out + place[:, None] + column[None, :], found.to(out.dtype.element_ty), mask=mask)
