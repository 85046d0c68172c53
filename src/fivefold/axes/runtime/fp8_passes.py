"""Passes over a matrix that becomes one in 8 bits: its largest magnitudes, and casts both ways round.

A product takes its left matrix row by row and its right one column by column, so what goes into two products
is wanted in its own order and transposed. Each operator reads the matrix once: on a GPU a kernel of ours does
(`fp8_kernels`), on a CPU torch's operations, which compute the same bits.

Scales are float32: one [] for all numbers, or one for each row [rows, 1] or each column [1, columns].
"""

import torch
from torch import Tensor

from fivefold.operators import operator


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and x.is_contiguous() and x.numel() > 0


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x times its scale, rounded once, to the nearest."""
    return (x.float() * scale).to(dtype)


def _turned(values: Tensor) -> Tensor:
    return values.t().clone(memory_format=torch.contiguous_format)


@operator(lambda x, scale, dtype: torch.empty_like(x, dtype=dtype), cheap=True)
def cast_rows(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [rows, columns], scaled as a whole or by rows, in 8 bits [rows, columns]."""
    if not _has_kernel(x):
        return rounded(x, scale, dtype)
    from fivefold.axes.runtime import fp8_kernels

    values, _ = fp8_kernels.cast(x, scale, None, dtype)
    assert values is not None
    return values


@operator(lambda x, scale, dtype, after: x.new_empty(x.shape[1], x.shape[0], dtype=dtype), cheap=True)
def cast_columns(x: Tensor, scale: Tensor, dtype: torch.dtype, after: Tensor | None) -> Tensor:
    """x [rows, columns], scaled as a whole or by columns, in 8 bits and transposed [columns, rows].

    after  made no earlier than this: or compilers cast for backward in forward, and keep that until then
    """
    if not _has_kernel(x):
        return _turned(rounded(x, scale, dtype))
    from fivefold.axes.runtime import fp8_kernels

    _, turned = fp8_kernels.cast(x, None, scale, dtype)
    assert turned is not None
    return turned


@operator(
    lambda x, of_rows, of_columns, dtype: (
        torch.empty_like(x, dtype=dtype),
        x.new_empty(x.shape[1], x.shape[0], dtype=dtype),
    ),
    cheap=True,
)
def cast_both(x: Tensor, of_rows: Tensor, of_columns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both of these casts of x: [rows, columns] and [columns, rows]. Scales are one, or one for each."""
    if not _has_kernel(x):
        values = rounded(x, of_rows, dtype)
        return values, _turned(rounded(x, of_columns, dtype) if of_columns.dim() else values)
    from fivefold.axes.runtime import fp8_kernels

    by_rows, by_columns = fp8_kernels.cast(x, of_rows, of_columns, dtype)
    assert by_rows is not None
    assert by_columns is not None
    return by_rows, by_columns


def _like_largest(x: Tensor, of_rows: bool, of_columns: bool) -> list[Tensor]:
    wide = x.new_empty((), dtype=torch.float32)
    found = [wide.new_empty(x.shape[0], 1)] if of_rows else []
    found += [wide.new_empty(1, x.shape[1])] if of_columns else []
    return found or [wide]


@operator(_like_largest, cheap=True)
def largest_magnitudes(x: Tensor, of_rows: bool, of_columns: bool) -> list[Tensor]:
    """Of x [rows, columns]: of all [], or of rows [rows, 1], of columns [1, columns], or of both; float32."""
    if not _has_kernel(x):
        return plain_largest(x, of_rows, of_columns)
    from fivefold.axes.runtime import fp8_kernels

    return list(fp8_kernels.largest(x, of_rows, of_columns))


def plain_largest(x: Tensor, of_rows: bool, of_columns: bool) -> list[Tensor]:
    """As `largest_magnitudes`, in operations that compilers put into the kernel that makes x.

    Also of all numbers row by row first: so does a norm go through them.
    """
    magnitudes = x.abs()
    by_row = magnitudes.amax(1, keepdim=True)
    found = [by_row.float()] if of_rows else []
    found += [magnitudes.amax(0, keepdim=True).float()] if of_columns else []
    return found or [by_row.amax().float()]
