"""The kernels of casts and largest magnitudes against torch's operations, run by Triton's interpreter.

A program of its own: the interpreter is switched on for a whole process, before Triton is imported. It rounds
float32 to 8 bits in its own way (ties go up, what carries is lost), so it is given torch's rounding here. The
instruction of a GPU is held to that in `tests/gpu`.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from fivefold.axes.runtime import fp8_kernels
from fivefold.axes.runtime.fp8_numbers import E4M3, E5M2, scale_for
from fivefold.axes.runtime.fp8_passes import cast_both, cast_columns, cast_rows, plain_largest

_theirs = interpreter._convert_float


def _rounded_by_torch(data: Any, source: Any, target: Any, mode: Any) -> Any:
    formats = {tl.float8e4nv: E4M3, tl.float8e5: E5M2}
    if source != tl.float32 or target not in formats:
        return _theirs(data, source, target, mode)
    narrow = torch.from_numpy(np.ascontiguousarray(data)).to(formats[target])
    return narrow.view(torch.uint8).numpy()


interpreter._convert_float = _rounded_by_torch

STRANGE = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -9e-39, 3.38e38, -3.38e38, 448.0, 57344.0)
SIDES = st.sampled_from([16, 32, 48, 112, 128, 144, 160, 272])
TILES = st.sampled_from([(16, 16), (32, 64), (64, 32), (128, 128)])


def matrix(rows: int, columns: int, seed: int, spread: float, strange: float | None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randn(rows, columns, generator=generator)
    x = (signs * (torch.randn(rows, columns, generator=generator) * spread).exp2()).bfloat16()
    if strange is not None:
        x[seed % rows, seed % columns] = strange
    return x


def assert_same_bytes(found: Tensor | None, expected: Tensor) -> None:
    """NaN is NaN, whatever its bits."""
    assert found is not None
    assert found.is_contiguous()
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    nan = expected.float().isnan()
    assert torch.equal(found.float().isnan(), nan)
    assert torch.equal(found.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])


ANY = {
    "rows": SIDES,
    "columns": SIDES,
    "seed": st.integers(0, 2**16),
    "spread": st.sampled_from([0.5, 6.0, 30.0]),
    "strange": st.sampled_from([None, *STRANGE]),
}


@given(**ANY, rowwise=st.booleans(), dtype=st.sampled_from([E4M3, E5M2]), tile=TILES)
@settings(deadline=None, max_examples=60)
def any_cast(
    rows: int,
    columns: int,
    seed: int,
    spread: float,
    strange: float | None,
    rowwise: bool,
    dtype: torch.dtype,
    tile: tuple[int, int],
) -> None:
    x = matrix(rows, columns, seed, spread, strange)
    of_rows, of_columns = (scale_for(amax, dtype) for amax in (plain_largest(x, True, True)))
    if not rowwise:
        of_rows = of_columns = scale_for(plain_largest(x, False, False)[0], dtype)
    values, turned = fp8_kernels.cast(x, of_rows, of_columns, dtype, tile)
    for found, expected in zip((values, turned), cast_both(x, of_rows, of_columns, dtype), strict=True):
        assert_same_bytes(found, expected)
    values, nothing = fp8_kernels.cast(x, of_rows, None, dtype, tile)
    assert_same_bytes(values, cast_rows(x, of_rows, dtype))
    assert nothing is None
    nothing, turned = fp8_kernels.cast(x, None, of_columns, dtype, tile)
    assert_same_bytes(turned, cast_columns(x, of_columns, dtype, None))
    assert nothing is None


@given(**ANY, of_rows=st.booleans(), of_columns=st.booleans())
@settings(deadline=None, max_examples=60)
def any_largest(
    rows: int,
    columns: int,
    seed: int,
    spread: float,
    strange: float | None,
    of_rows: bool,
    of_columns: bool,
) -> None:
    x = matrix(rows, columns, seed, spread, strange)
    found = fp8_kernels.largest(x, of_rows, of_columns)
    expected = plain_largest(x, of_rows, of_columns)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def what_is_no_such_matrix_is_refused() -> None:
    x = matrix(32, 16, 0, 1.0, None)
    for wrong in (x.t(), x.float(), x[None]):
        with pytest.raises(ValueError, match="not a contiguous matrix in bfloat16"):
            fp8_kernels.largest(wrong, True, False)


if __name__ == "__main__":
    any_cast()
    any_largest()
    what_is_no_such_matrix_is_refused()
    print("the same bits")
