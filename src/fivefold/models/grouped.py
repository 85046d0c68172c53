"""Rows multiplied by the matrix of their group: one product for all where there is a kernel for it."""

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """`F.linear` with one weight a group. Groups may be empty.

    rows     [N, in], those of group 0 first, then those of group 1, ...
    weight   [G, out, in]
    bias     [G, out] or None
    counts   [G] int64, rows in each group; they add up to N
    returns  [N, out]
    """
    if not has_grouped_kernel(rows, weight):
        return _looped(rows, weight, bias, counts)
    ends = counts.cumsum(0).to(torch.int32)
    return add_bias(F.grouped_mm(rows, weight.transpose(1, 2), offs=ends), bias, counts)


def add_bias(rows: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """To each row that of its group: rows [N, out], bias [G, out] or None, counts [G] -> [N, out]."""
    if bias is None:
        return rows
    # A product, not a lookup: a lookup's derivative adds many rows up in bfloat16, in any order.
    return rows + F.one_hot(group_of_rows(counts, len(rows)), len(counts)).to(bias.dtype) @ bias


def group_of_rows(counts: Tensor, rows: int) -> Tensor:
    """Which group each row belongs to: counts [G] int64, which add up to `rows` -> [rows] int64."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=rows)


def has_grouped_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Whether the GPU has one kernel for it: bfloat16, rows aligned to 16 bytes, at least one row."""
    aligned = all(size % 8 == 0 for size in weight.shape[1:])
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and len(rows) > 0


def _looped(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    biases = [None] * len(parts) if bias is None else bias.unbind()
    return torch.cat([F.linear(*group) for group in zip(parts, weight.unbind(), biases, strict=True)])
