"""Attention across ranks on the kernels of a GPU. Two processes share the card; messages go over gloo."""

from __future__ import annotations

import pytest
import torch

from fivefold.training.ranks import run_ranks
from tests.axes.test_context import KINDS, attention_errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HEADS = [(8, 8), (8, 2), (4, 1)]
CASES = [(kind, *heads, separate) for kind in KINDS for heads in HEADS for separate in (False, True)]


def complaints(dtype: torch.dtype, length: int, width: int, fine: float) -> list[str]:
    """Everything that errs more than `fine`, and more than twice as much as plain attention."""
    by_rank = run_ranks(attention_errors, 2, CASES, "cuda:0", dtype, length, width)
    return [
        f"rank {rank}, {case}: {name} is off by {error:.1e}, plain attention by {plain:.1e}"
        for rank, found in enumerate(by_rank)
        for case, errors in zip(CASES, found, strict=True)
        for name, error, plain in errors
        if not error <= max(2 * plain, fine)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("length", "width"), [(1024, 128), (520, 64)])  # the second fits no kernel's tiles
def test_flash_kernels_err_little_more_than_plain_attention(
    dtype: torch.dtype, length: int, width: int
) -> None:
    """Of the result and of every gradient, against float64."""
    assert complaints(dtype, length, width, fine=0.0) == []


def test_float32_has_no_kernel_and_is_worked_out_in_tiles() -> None:
    assert complaints(torch.float32, 1040, 32, fine=1e-5) == []
