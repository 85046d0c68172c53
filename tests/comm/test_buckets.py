"""Buckets: a partition that depends on sizes alone, and sums that are those of all ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fivefold.comm.buckets import BucketedAllReduce
from fivefold.comm.payloads import fill_buckets
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.models.inventory import parameters
from fivefold.training.build import build
from fivefold.training.failures import RanksFailed
from fivefold.training.ranks import run_ranks
from tests.cases import Case, batches
from tests.ranks import on_ranks

SIZES = st.lists(st.integers(1, 1000), max_size=40)


@given(SIZES, st.integers(1, 2000))
def test_buckets_are_a_partition_from_last_to_first(sizes: list[int], limit: int) -> None:
    buckets = fill_buckets(sizes, limit)
    assert [index for bucket in buckets for index in bucket] == list(reversed(range(len(sizes))))
    assert all(buckets)
    for bucket in buckets:
        assert len(bucket) == 1 or sum(sizes[index] for index in bucket) <= limit
    for bucket, following in pairwise(buckets):
        assert sum(sizes[index] for index in bucket) + sizes[following[0]] > limit, "room was left"


def buckets_of_a_run(world: World, job: Job) -> list[list[list[int]]]:
    """The buckets before the first step, and after each of two."""
    built = build(job, world.device)
    (buckets,) = built.step.buckets
    found = [buckets.buckets]
    with batches(job, built) as loader:
        for step in (1, 2):
            built.step(next(loader), 1e-2, step)
            found.append(buckets.buckets)
    return found


def test_a_run_has_the_buckets_of_its_model_from_beginning_to_end() -> None:
    job = Case("buckets", 2, {"zero": 0, "bucket_mb": 0.02}, {"micro_batch": 2}).job()
    sizes = [parameter.count * 8 for parameter in parameters(job.spec)]
    buckets = fill_buckets(sizes, int(job.layout.bucket_mb * 2**20))
    assert len(buckets) > 3
    for found in on_ranks(buckets_of_a_run, 2, job):
        assert found == [buckets] * 3


SHAPES = [(3, 2), (5,), (1, 1), (4, 4)]
ORDERS = [[3, 2, 1, 0], [0, 1, 2, 3], [2, 0, 3, 1]]


def values(rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(SHAPES[index], generator=generator, dtype=torch.float64)


def sums(world: World, limit: int) -> list[list[torch.Tensor]]:
    """The summed gradients, for each order in which they become ready on this rank."""
    masters = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES]
    buckets = fill_buckets([master.numel() * 8 for master in masters], limit)
    assert dist.group.WORLD is not None
    reducer = BucketedAllReduce(masters, buckets, dist.group.WORLD)
    found = []
    for order in ORDERS:
        for index, master in enumerate(masters):
            master.grad = values(world.rank, index)
            reducer.ready(index)  # of a step that nobody announced: nothing is summed
        reducer.finish()
        assert all(
            torch.equal(m.grad, values(world.rank, i)) for i, m in enumerate(masters) if m.grad is not None
        )
        reducer.expect(2)  # of a step of two backward passes, the first brings nothing to sum yet
        for index in [*order, *order]:
            reducer.ready(index)
        reducer.finish()
        found.append([master.grad.clone() for master in masters if master.grad is not None])
    return found


@pytest.mark.parametrize("limit", [1, 100, 10_000])
def test_gradients_are_summed_whatever_the_order_within_a_bucket(limit: int) -> None:
    expected = [values(0, index) + values(1, index) for index in range(4)]
    for found in on_ranks(sums, 2, limit):
        for gradients in found:
            assert len(gradients) == 4
            assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def finish_without_one(world: World) -> None:
    masters = [torch.ones(3, requires_grad=True) for _ in range(3)]
    for master in masters[1:]:
        master.grad = torch.ones(3)
    assert dist.group.WORLD is not None
    reducer = BucketedAllReduce(masters, [[2], [1, 0]], dist.group.WORLD)
    reducer.expect(1)
    for index in (2, 1):
        reducer.ready(index)
    reducer.finish()


def test_a_gradient_that_never_comes_is_an_error() -> None:
    with pytest.raises(RanksFailed, match="never filled"):
        run_ranks(finish_without_one, 2)


def train_without_one(world: World, job: Job) -> None:
    """A parameter that takes no part in the loss."""
    built = build(job, world.device)
    dict(built.model.named_parameters())["blocks.1.mlp.up.weight"].requires_grad_(False)
    with batches(job, built) as loader:
        built.step(next(loader), 1e-2, 1)


def test_a_parameter_without_gradient_is_an_error_in_training_too() -> None:
    with pytest.raises(RanksFailed, match="never filled"):
        run_ranks(train_without_one, 2, Case("frozen", 2, {"zero": 0}).job())
    with pytest.raises(RuntimeError, match=r"parameter blocks\.1\.mlp\.up\.weight got no gradient"):
        run_ranks(train_without_one, 1, Case("frozen").job())
