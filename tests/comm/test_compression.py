"""Sums in fewer bits: how far off they may be, that all ranks agree, and that nothing is lost for good."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fivefold.comm.compression import CompressedSum, Residual, packed, reduce_scattered, unpacked
from fivefold.comm.payloads import BLOCK, compressed_bytes, packed_bytes
from fivefold.comm.world import World
from tests.cases import Case, losses
from tests.ranks import on_ranks

SIZES = (1, BLOCK - 1, 4 * BLOCK, 5000)


@given(st.integers(1, 4), st.integers(0, 2**31), st.floats(1e-30, 1e30))
def test_numbers_come_back_to_half_a_step(blocks: int, seed: int, size: float) -> None:
    x = size * torch.randn(2, blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
    largest = x.unflatten(-1, (blocks, BLOCK)).abs().amax(-1, keepdim=True)
    off = (unpacked(packed(x, "int8"), "int8", x.shape[-1]) - x).unflatten(-1, (blocks, BLOCK)).abs()
    assert (off <= 0.505 * largest / 127).all()
    assert packed(x, "int8").shape == (2, blocks * (BLOCK + 2))


def test_zeros_are_zeros() -> None:
    assert unpacked(packed(torch.zeros(BLOCK), "int8"), "int8", BLOCK).eq(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(bad: float) -> None:
    x = torch.ones(2 * BLOCK)
    x[3] = bad
    found = unpacked(packed(x, "int8"), "int8", x.shape[-1])
    assert not found[:BLOCK].isfinite().any()
    assert (found[BLOCK:] - 1).abs().max() < 1 / 127


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_have_the_same_sum_to_two_roundings(ranks: int) -> None:
    found = on_ranks(_summed, ranks)
    for size, *sums in zip(SIZES, *found, strict=True):
        mine = [_numbers(size, rank) for rank in range(ranks)]
        assert all(torch.equal(one, sums[0]) for one in sums)
        assert sums[0].dtype == torch.float64
        largest = sum(x.abs().max() for x in mine)  # also of the sum at most
        assert (sums[0] - sum(mine)).abs().max() <= 2 * 0.505 * largest / 127


def _numbers(size: int, rank: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _summed(world: World) -> list[torch.Tensor]:
    found = []
    for size in SIZES:
        assert dist.group.WORLD is not None
        flight = CompressedSum(_numbers(size, world.rank), dist.group.WORLD)
        flight.add()
        found.append(flight.result())
    return found


def _part_of_sum(world: World, numbers: list[torch.Tensor]) -> torch.Tensor:
    assert dist.group.WORLD is not None
    return reduce_scattered(numbers[world.rank], dist.group.WORLD, "int8", None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_are_made_in_float32(ranks: int) -> None:
    """Of numbers of which 8 bits lose nothing: what is off was added too coarsely."""
    steps = torch.arange(4 * BLOCK) % 255 - 127
    steps[::BLOCK] = 127
    numbers = [steps * 2.0 ** (-5 * rank) for rank in range(ranks)]  # together 22 bits
    found = torch.cat(on_ranks(_part_of_sum, ranks, numbers))
    assert torch.equal(found, torch.stack(numbers).sum(0))


def test_bytes_of_a_message() -> None:
    assert compressed_bytes(1, 2, "int8") == 2 * (BLOCK + 2)
    assert compressed_bytes(8 * BLOCK, 4, "int8") == 8 * (BLOCK + 2)
    assert compressed_bytes(8 * BLOCK + 1, 4, "int8") == 12 * (BLOCK + 2)
    assert compressed_bytes(9, 4, "bf16") == 4 * 3 * 2
    for kind in ("int8", "bf16"):
        for size in SIZES:
            assert packed(torch.ones(size), kind).numel() == packed_bytes(size, kind)


def test_a_job_trains_as_well() -> None:
    """Twenty steps of AdamW: its losses stay within three percent of those of whole gradients."""
    whole = Case("whole", 2, {"zero": 0}, {"precision": "fp32"})
    int8 = Case("int8", 2, {"zero": 0}, {"precision": "fp32"}, communication={"compress": "int8"})
    one, other = (on_ranks(_losses, 2, case)[0] for case in (whole, int8))
    assert one != other
    assert other == pytest.approx(one, rel=0.03)


def _losses(world: World, case: Case) -> list[float]:
    return [loss for loss, _ in losses(case.job())]


# --- error feedback ----------------------------------------------------------------------------------------

STEPS = 64  # without feedback errors add up as a random walk


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["int8", "bf16"])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_what_is_applied_stays_near_what_is_true(operation: str, kind: str, ranks: int) -> None:
    """Gradients that change a little from step to step, as they do: sums of all steps, applied and true."""
    on, off = (on_ranks(_applied, ranks, operation, kind, feedback) for feedback in (True, False))
    for (with_feedback, true), (without, _) in zip(on, off, strict=True):
        near, far = (with_feedback - true).norm(), (without - true).norm()
        assert 0 < 5 * near <= far


def _applied(world: World, operation: str, kind: str, feedback: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Over all steps, this rank's result of one sum after the other; and what it should have been."""
    size, group = 3000, dist.group.WORLD
    assert group is not None
    residual = Residual(size, torch.device("cpu")) if feedback else None
    applied = true = torch.zeros(
        size if operation == "all_reduce" else size // world.size, dtype=torch.float64
    )
    for step in range(STEPS):
        every = [
            (_numbers(size, rank) + 0.1 * _numbers(size, 100 * step + rank)).float()
            for rank in range(world.size)
        ]
        total = torch.stack(every).double().sum(0)
        if operation == "all_reduce":
            flight = CompressedSum(every[world.rank], group, kind, residual)
            flight.add()
            found = flight.result()
        else:
            found = reduce_scattered(every[world.rank], group, kind, residual)
            total = total.view(world.size, -1)[world.rank]
        applied, true = applied + found.double(), true + total
    return applied, true
