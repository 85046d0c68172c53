"""Parts of attention put together: weighed by how much they count, or added; all at once, or in turns."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes.runtime.merging import Part, Parts, accumulator
from fivefold.ledger.work import BLOCKS_AT_ONCE

ROOT = Path(__file__).parents[2]


@settings(deadline=None)
@given(
    late=st.lists(st.booleans(), max_size=9),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    weighed=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_parts_are_put_together_however_many(
    late: list[bool], dtype: torch.dtype, weighed: bool, seed: int
) -> None:
    """As the sum of all of them in float64, but for the last rounding and those of the accumulator."""
    generator = torch.Generator().manual_seed(seed)
    half, wide = 3, accumulator(dtype)
    parts, sums, weights = (
        Parts(),
        torch.zeros(2, 2, 2 * half, 4).double(),
        torch.zeros(2, 2, 2 * half).double(),
    )
    for is_late in [False, *late]:
        first = half if is_late else 0
        value = torch.randn(2, 2, 2 * half - first, 4, generator=generator, dtype=torch.float64).to(dtype)
        lse = torch.randn(2, 2, 2 * half - first, generator=generator, dtype=torch.float64).to(wide)
        parts.add(Part(first, value, lse if weighed else None))
        weight = lse.double().exp() if weighed else torch.ones_like(lse).double()
        sums[:, :, first:] += value.double() * weight[..., None]
        weights[:, :, first:] += weight
    assert len(parts.waiting) <= BLOCKS_AT_ONCE
    out = torch.empty_like(sums, dtype=dtype)
    total = parts.put_into(out)
    exact = sums / weights[..., None] if weighed else sums
    fine = torch.finfo(wide).eps * (len(late) + 1) * 8
    allowed = torch.finfo(dtype).eps / 2 * exact.abs() + fine * exact.abs().max()
    assert bool(((out.double() - exact).abs() <= allowed).all())
    if total is not None:
        torch.testing.assert_close(total.double(), weights.log(), rtol=fine, atol=fine)
    assert (total is None) != weighed


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux")
def test_the_kernel_computes_what_torchs_operations_do() -> None:
    command = [sys.executable, "-m", "tests.axes.interpreted_merging"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the same numbers\n"
