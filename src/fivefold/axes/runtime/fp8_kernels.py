"""Casting to 8 bits, and finding the largest magnitudes, in one pass each: kernels of a GPU.

They compute the same bits as the operations of torch in `fp8_passes`, which says what is computed. A tile is
read once; what is wanted transposed is turned inside the tile, so that both results are written in long rows.

Numbers of 8 bits go through pointers to bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = (128, 128)
"""Rows and columns that one program works on: each of its rows and columns is 128 bytes long in 8 bits, a
whole line of the cache."""
WARPS = 8


def cast(
    x: Tensor,
    of_rows: Tensor | None,
    of_columns: Tensor | None,
    dtype: torch.dtype,
    tile: tuple[int, int] = TILE,
    warps: int = WARPS,
) -> tuple[Tensor | None, Tensor | None]:
    """As `fp8_passes`: x [rows, columns] times `of_rows` in its own order, times `of_columns` transposed.

    x                    bfloat16, contiguous
    of_rows, of_columns  float32 scales: one [] or each [rows, 1] and [1, columns]; None: not wanted
    returns              [rows, columns] and [columns, rows] in `dtype`, each contiguous
    """
    rows, columns = _sizes(x)
    values = None if of_rows is None else x.new_empty(rows, columns, dtype=dtype)
    turned = None if of_columns is None else x.new_empty(columns, rows, dtype=dtype)
    scales = [scale for scale in (of_rows, of_columns) if scale is not None]
    grid = (triton.cdiv(columns, tile[1]), triton.cdiv(rows, tile[0]))
    _cast[grid](
        x,
        x if values is None else values.view(torch.uint8),
        x if turned is None else turned.view(torch.uint8),
        scales[0],
        scales[-1],
        rows,
        columns,
        E5M2=dtype == torch.float8_e5m2,
        EACH=scales[0].dim() > 0,
        BY_ROWS=values is not None,
        BY_COLUMNS=turned is not None,
        ROWS=tile[0],
        COLUMNS=tile[1],
        num_warps=warps,
    )
    return values, turned


def largest(x: Tensor, of_rows: bool, of_columns: bool) -> tuple[Tensor, ...]:
    """The largest magnitudes of x [rows, columns], bfloat16 and contiguous: float32.

    Of all numbers [], or if asked for of rows [rows, 1], of columns [1, columns], or of both.
    """
    rows, columns = _sizes(x)
    whole = not (of_rows or of_columns)
    shapes = [(), (rows, 1), (1, columns)]
    wanted = [whole, of_rows, of_columns]
    # As integers, whose order is the same: what is the larger of a number and NaN is then no question.
    found = [
        torch.zeros(shape if asked else (), dtype=torch.int32, device=x.device)
        for shape, asked in zip(shapes, wanted, strict=True)
    ]
    grid = (triton.cdiv(columns, TILE[1]), triton.cdiv(rows, TILE[0]))
    _largest[grid](
        x.view(torch.int16),
        *found,
        rows,
        columns,
        WHOLE=whole,
        OF_ROWS=of_rows,
        OF_COLUMNS=of_columns,
        ROWS=TILE[0],
        COLUMNS=TILE[1],
        num_warps=WARPS,
    )
    return tuple((bits << 16).view(torch.float32) for bits, asked in zip(found, wanted, strict=True) if asked)


def _sizes(x: Tensor) -> tuple[int, int]:
    if x.dtype != torch.bfloat16 or x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"not a contiguous matrix in bfloat16: {x.dtype} {list(x.shape)}")
    return x.shape[0], x.shape[1]


@triton.jit
def _narrow(values, E5M2: tl.constexpr):  # noqa: N803
    """float32 rounded to the nearest number of 8 bits, as a byte."""
    if E5M2:
        narrow = values.to(tl.float8e5)
    else:
        narrow = values.to(tl.float8e4nv)
    return narrow.to(tl.uint8, bitcast=True)


@triton.jit
def _cast(
    x,
    values,
    turned,
    of_rows,
    of_columns,
    rows,
    columns,
    E5M2: tl.constexpr,  # noqa: N803
    EACH: tl.constexpr,  # noqa: N803
    BY_ROWS: tl.constexpr,  # noqa: N803
    BY_COLUMNS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    wide = tl.load(x + row[:, None] * columns + column[None, :], mask=there, other=0).to(tl.float32)
    if not EACH:
        narrow = _narrow(wide * tl.load(of_rows), E5M2)
    if BY_ROWS:
        if EACH:
            scale = tl.load(of_rows + row, mask=row < rows, other=1)
            narrow = _narrow(wide * scale[:, None], E5M2)
        tl.store(values + row[:, None] * columns + column[None, :], narrow, mask=there)
    if BY_COLUMNS:
        if EACH:
            scale = tl.load(of_columns + column, mask=column < columns, other=1)
            narrow = _narrow(wide * scale[None, :], E5M2)
        there = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(turned + column[:, None] * rows + row[None, :], tl.trans(narrow), mask=there)


@triton.jit
def _largest(
    x,
    of_all,
    of_rows,
    of_columns,
    rows,
    columns,
    WHOLE: tl.constexpr,  # noqa: N803
    OF_ROWS: tl.constexpr,  # noqa: N803
    OF_COLUMNS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    bits = tl.load(x + row[:, None] * columns + column[None, :], mask=there, other=0).to(tl.int32) & 0x7FFF
    if WHOLE:
        tl.atomic_max(of_all, tl.max(tl.max(bits, 1), 0), sem="relaxed")
    if OF_ROWS:
        tl.atomic_max(of_rows + row, tl.max(bits, 1), mask=row < rows, sem="relaxed")
    if OF_COLUMNS:
        tl.atomic_max(of_columns + column, tl.max(bits, 0), mask=column < columns, sem="relaxed")
