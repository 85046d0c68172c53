"""Collectives over nothing but send and receive: what torch.distributed computes, of any size and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.layout import Layout
from fivefold.comm import send_receive
from fivefold.comm.algorithms import ALGORITHMS, chunk_sizes, sent_by
from fivefold.comm.world import World
from fivefold.problems import BadInput
from tests.cases import mesh_of
from tests.ranks import on_ranks
from tests.tracer import MessageTracer

ALL_REDUCES = ("naive", "ring", "tree", "halving-doubling")
SIZES = (1, 5, 7, 24, 97)


def values(rank: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def group_of(world: World) -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def results(world: World, size: int) -> dict[str, tuple[Any, Any]]:
    """Of each operation, what ours and torch's own make of it."""
    group, ranks, rank = group_of(world), world.size, world.rank
    x = values(rank, size)
    total = x.clone()
    dist.all_reduce(total)
    found: dict[str, tuple[Any, Any]] = {}
    for by in ALL_REDUCES:
        found[by] = send_receive.all_reduce(x, group, by), total
    of_root = x.clone()
    dist.broadcast(of_root, 0)
    found["broadcast"] = send_receive.broadcast(x, group), of_root
    found["reduce"] = send_receive.reduce(x, group), total if rank == 0 else None
    gathered = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(gathered, x)
    found["all_gather"] = send_receive.all_gather(x, group), torch.cat(gathered)
    sizes = chunk_sizes(size, ranks)
    piece = send_receive.reduce_scatter(x, group)
    found["reduce_scatter"] = piece, total.split(sizes)[rank]
    found["of both"] = send_receive.all_gather(piece, group, size), total
    mine = [torch.empty(sizes[rank], dtype=x.dtype) for _ in range(ranks)]
    for to in range(ranks):  # gloo has no all-to-all of lists
        dist.gather(x.split(sizes)[to].contiguous(), mine if rank == to else None, dst=to)
    found["all_to_all"] = send_receive.all_to_all(x, group), torch.cat(mine)
    return found


@pytest.mark.parametrize(
    "ranks", [2, 3, 4, 6, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (5, 7, 8))]
)
def test_results_are_those_of_torch(ranks: int) -> None:
    for size in SIZES:
        for found in on_ranks(results, ranks, size):
            for name, (ours, theirs) in found.items():
                if theirs is None:
                    assert ours is None
                else:
                    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=f"{name}, {size}")


def whole_numbers(rank: int, dtype: torch.dtype) -> Tensor:
    """[5, 6] whose sums are exact in every dtype and order."""
    return (4 * values(rank, 30)).round().to(dtype).view(5, 6)


def in_dtype(world: World, dtype: torch.dtype) -> list[Tensor]:
    mine = whole_numbers(world.rank, dtype)
    return [send_receive.all_reduce(mine, group_of(world), by) for by in ALL_REDUCES]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.complex64]
)
def test_any_dtype_and_shape(dtype: torch.dtype) -> None:
    wanted = torch.stack([whole_numbers(rank, dtype) for rank in range(3)]).sum(0)
    for found in on_ranks(in_dtype, 3, dtype):
        for sum_of_all in found:
            assert sum_of_all.dtype == dtype
            assert torch.equal(sum_of_all, wanted)


def traced(world: World, elements: int) -> dict[str, tuple[int, int]]:
    """(messages, bytes) that this rank sends for each all-reduce of float32."""
    found = {}
    for by in ALL_REDUCES:
        with MessageTracer(mesh_of(Layout(dp_replicate=world.size))) as tracer:
            send_receive.all_reduce(torch.ones(elements), group_of(world), by)
        sent = [message.payload for message in tracer.seen if message.operation == "send"]
        found[by] = len(sent), sum(sent)
    return found


@pytest.mark.parametrize("ranks", [4, 6])
def test_what_is_sent_is_what_the_algorithm_says(ranks: int) -> None:
    elements = 48
    for rank, found in enumerate(on_ranks(traced, ranks, elements)):
        for by, (messages, sent) in found.items():
            algorithm = ALGORITHMS[by]
            moves, chunks = sent_by(algorithm, ranks)[rank]
            assert messages == moves
            assert sent == chunks * 4 * elements // algorithm.chunks(ranks)


def disagreeing(world: World, what: str) -> str:
    group = group_of(world)
    odd = world.rank == 1
    try:
        if what == "size":
            send_receive.all_reduce(torch.ones(6 if odd else 5), group)
        elif what == "dtype":
            send_receive.all_reduce(torch.ones(5, dtype=torch.float64 if odd else torch.float32), group)
        else:
            send_receive.all_gather(torch.ones(5 if odd else 3), group, total=9)
    except BadInput as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("size", "rank 1 has 6 of float32; the others have 5 of float32"),
        ("dtype", "rank 1 has 5 of float64; the others have 5 of float32"),
        ("piece", "rank 1 has 11 of float32; the others have 9 of float32"),
    ],
)
def test_ranks_that_disagree_are_named(what: str, said: str) -> None:
    for found in on_ranks(disagreeing, 3, what):
        assert said in found
