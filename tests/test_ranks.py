"""Ranks that stay: the same processes for every test, none of its state, and fresh ones after a failure."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.training.failures import RanksFailed
from tests.ranks import on_ranks


def process(world: Any) -> int:
    return os.getpid()


def leaves_its_mark(world: Any, value: str) -> tuple[str | None, torch.dtype, bool, float]:
    """What an earlier call has left, and a mark for the next one."""
    found = os.environ.get("MARK"), torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(()).item()
    os.environ["MARK"] = value
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return found


def fails(world: Any, how: str) -> None:
    if world.rank == 1:
        if how == "raises":
            raise ValueError("a rank of its own will")
        os._exit(9)
    dist.barrier()


def test_processes_stay_and_state_does_not() -> None:
    before = on_ranks(process, 2)
    first, second = (on_ranks(leaves_its_mark, 2, value) for value in ("one", "two"))
    assert on_ranks(process, 2) == before
    assert len(set(before)) == 2
    assert first == second
    assert first[0][:3] == (None, torch.float32, True)


@pytest.mark.parametrize(("how", "said"), [("raises", "ValueError: a rank of its own will"), ("dies", "9")])
def test_a_failure_names_the_rank_and_ends_its_world(how: str, said: str) -> None:
    before = on_ranks(process, 2)
    with pytest.raises(RanksFailed, match=f"rank 1 failed.*{said}"):
        on_ranks(fails, 2, how)
    assert not set(before) & set(on_ranks(process, 2))
