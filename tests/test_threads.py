"""Threads wait asleep: beside other processes a spinning one holds the core that it waits for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fivefold.threads import cores, share_cores, wait_asleep


def test_openmp_has_read_it_before_anything_imports_torch() -> None:
    """OpenMP itself prints what it has read."""
    left = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    shown = subprocess.run(
        [sys.executable, "-c", "import fivefold.training.ranks"],
        env=left | {"OMP_DISPLAY_ENV": "true"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in shown.stderr


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_the_user_says_stays(name: str) -> None:
    environment = {name: "1"}
    wait_asleep(environment)
    assert environment == {name: "1"}


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        monkeypatch.setattr("fivefold.threads.cores", lambda: 8)
        share_cores(3)
        assert torch.get_num_threads() == 2
        share_cores(16)
        assert torch.get_num_threads() == 1
        share_cores(1)
        assert torch.get_num_threads() == 1, "fewer threads, where there were fewer"
    finally:
        torch.set_num_threads(before)


def test_cores_are_those_that_this_process_may_use() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
