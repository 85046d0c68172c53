"""The kernel that puts parts of attention together against torch's operations, run by Triton's interpreter.

A program of its own: the interpreter is switched on for a whole process, before Triton is imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes.runtime import merging_kernel
from fivefold.axes.runtime.merging import Part, by_torch

FINEST = 2.0**-20
"""What the order of float32 operations, and another exponential, may change of the largest number."""


def in_some_order(shape: tuple[int, ...], by_token: bool) -> torch.Tensor:
    rows, heads, queries, width = shape
    return torch.empty(rows, queries, heads, width).transpose(1, 2) if by_token else torch.empty(shape)


@given(
    rows=st.integers(1, 2),
    heads=st.integers(1, 3),
    half=st.integers(1, 20),
    width=st.sampled_from([8, 24, 64]),
    late=st.lists(st.booleans(), max_size=3),
    narrow=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    weighed=st.booleans(),
    by_token=st.booleans(),
    unseen=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=25)
def any_parts(
    rows: int,
    heads: int,
    half: int,
    width: int,
    late: list[bool],
    narrow: torch.dtype,
    weighed: bool,
    by_token: bool,
    unseen: float,
    seed: int,
) -> None:
    """Wherever they begin and however they lie; of what does not count nothing is read, not even NaN."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for number, is_late in enumerate([False, *late]):
        first = half if is_late else 0
        shape = (rows, heads, 2 * half - first, width)
        value = in_some_order(shape, by_token=number % 2 == 0).to(narrow)
        value.copy_(torch.randn(shape, generator=generator))
        if not weighed:
            parts.append(Part(first, value))
            continue
        lse = 10 * torch.randn(shape[:-1], generator=generator)
        if number:
            lse[torch.rand(lse.shape, generator=generator) < unseen] = -torch.inf
        parts.append(Part(first, value, lse))
    shape = (rows, heads, 2 * half, width)
    expected, out = in_some_order(shape, False), in_some_order(shape, by_token)
    total = by_torch(parts, expected)
    for part in parts if weighed else ():
        assert part.lse is not None
        part.value[part.lse == -torch.inf] = torch.nan
    found = merging_kernel.put_together(parts, out)
    scale = max(float(part.value.nan_to_num().abs().max()) for part in parts)
    torch.testing.assert_close(out, expected, rtol=0, atol=FINEST * scale * len(parts))
    assert (found is None) == (total is None)
    if found is not None and total is not None:
        torch.testing.assert_close(found, total, rtol=FINEST, atol=FINEST)


def what_is_rounded() -> None:
    """Once, into the numbers of the result; the interpreter cuts bfloat16 off, where a GPU rounds."""
    shape = (1, 2, 6, 16)
    parts = [Part(first, torch.randn(1, 2, 6 - first, 16).bfloat16()) for first in (0, 3, 0)]
    exact = torch.empty(shape)
    by_torch(parts, exact)
    for dtype, rounding in ((torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-11)):
        out = torch.empty(shape, dtype=dtype)
        merging_kernel.put_together(parts, out)
        torch.testing.assert_close(out.float(), exact, rtol=rounding, atol=1e-6)


if __name__ == "__main__":
    any_parts()
    what_is_rounded()
    print("the same numbers")
