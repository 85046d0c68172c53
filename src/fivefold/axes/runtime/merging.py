"""Results of attention to several blocks of keys, put together in few passes over memory.

What blocks contribute to a result counts by the log-sum-exp of their scores; what they contribute to a
gradient is added up. Either way the blocks' own numbers are kept as their kernels give them, read once, added
up in float32 or wider, and rounded once: on a GPU by one kernel (`merging_kernel`), elsewhere by torch's
operations. After `BLOCKS_AT_ONCE` blocks what is there is put together in float32, so that memory does not
grow with their number.

Of a block in 16 bits each number has been rounded once, by at most 2^-9 (bfloat16) or 2^-12 (float16) of
itself. Its share of the result is off by as much of its share, so a result of blocks is off by at most twice
what one kernel's is, measured against the largest value rather than their sum where blocks cancel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.ledger.work import BLOCKS_AT_ONCE


class Part(NamedTuple):
    """What one block contributes.

    first  the first query that it has to do with; all behind it have, too
    value  [B, H, Q - first, D], any order in memory
    lse    [B, H, Q - first], contiguous: how much it counts, minus infinity where it does not; None: it is
           added
    """

    first: int
    value: Tensor
    lse: Tensor | None = None


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """In which numbers results of several blocks are added up."""
    return torch.promote_types(dtype, torch.float32)


class Parts:
    """Parts as they come; the first is about all queries, and each of them sees a key of it."""

    def __init__(self) -> None:
        self.waiting: list[Part] = []

    def add(self, part: Part) -> None:
        if len(self.waiting) == BLOCKS_AT_ONCE:
            like = self.waiting[0].value
            wide = torch.empty_like(like, dtype=accumulator(like.dtype))
            self.waiting = [Part(0, wide, self.put_into(wide))]
        self.waiting.append(part)

    def put_into(self, out: Tensor) -> Tensor | None:
        """All parts together into `out` [B, H, Q, D], any dtype and order; returns their log-sum-exp."""
        return put_together(self.waiting, out)


def put_together(parts: list[Part], out: Tensor) -> Tensor | None:
    """As `Parts.put_into`, of at most `BLOCKS_AT_ONCE`."""
    if out.device.type == "cuda" and accumulator(out.dtype) == torch.float32:
        from fivefold.axes.runtime import merging_kernel

        return merging_kernel.put_together(parts, out)
    return by_torch(parts, out)


def by_torch(parts: list[Part], out: Tensor) -> Tensor | None:
    """The same by torch's operations."""
    (_, value, lse), *others = parts
    if lse is None:
        wide = value.to(accumulator(out.dtype), copy=True)
        for part in others:
            wide[:, :, part.first :] += part.value
        out.copy_(wide)
        return None
    total = lse.clone()
    for first, _, weight in others:
        assert weight is not None
        total[:, :, first:] = torch.logaddexp(total[:, :, first:], weight)
    wide = value * (lse - total).exp_()[..., None]
    for first, value, weight in others:
        assert weight is not None
        wide[:, :, first:] += value * (weight - total[:, :, first:]).exp_()[..., None]
    out.copy_(wide)
    return total
