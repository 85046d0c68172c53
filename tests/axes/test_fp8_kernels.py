"""The kernels that cast to 8 bits on a GPU, run on a CPU by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux")
def test_kernels_compute_the_bits_of_torchs_operations() -> None:
    command = [sys.executable, "-m", "tests.axes.fp8_interpreted"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the same bits\n"
