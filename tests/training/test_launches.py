"""Kernels that take many tensors in one launch: norm and AdamW of a GPU, by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.training.launches import CHUNK, dealt

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux")
def test_the_kernels_compute_what_torchs_operations_do() -> None:
    command = [sys.executable, "-m", "tests.training.interpreted_launches"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the same numbers\n"


@given(sizes=st.lists(st.sampled_from([1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]), min_size=1, max_size=5))
def test_each_element_is_dealt_out_once(sizes: list[int]) -> None:
    table = dealt(tuple(sizes), torch.device("cpu"))
    assert table.sizes.tolist() == sizes
    found = list(zip(table.tensor.tolist(), table.chunk.tolist(), strict=True))
    assert found == [(n, chunk) for n, size in enumerate(sizes) for chunk in range(-(-size // CHUNK))]
