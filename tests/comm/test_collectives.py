"""Collectives and their derivatives, against the same sums written out on one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.comm import collectives
from fivefold.comm.collectives import Group
from fivefold.comm.compat import functional
from fivefold.comm.world import World
from tests.ranks import on_ranks

Tensors = list[Tensor]


def values(rank: int, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def sent_rows(ranks: int, rank: int) -> list[int]:
    """How many rows a rank sends to each of the others: all different, some none."""
    return [(3 * rank + 2 * to) % 5 for to in range(ranks)]


def received_rows(ranks: int, rank: int) -> list[int]:
    return [sent_rows(ranks, source)[rank] for source in range(ranks)]


def shape_on(operation: str, ranks: int, rank: int) -> tuple[int, ...]:
    if operation == "all_to_all":
        return (sum(sent_rows(ranks, rank)), 3)
    return (4, 8, 12)  # each divides by 2 and by 4


# --- on ranks ----------------------------------------------------------------------------------------------


def run_one(operation: str, x: Tensor, group: Group, rank: int, ranks: int) -> Tensor:
    name, _, dim = operation.partition(" ")
    if name == "all_gather":
        return collectives.all_gather(x, group, int(dim))
    if name == "reduce_scatter":
        return collectives.reduce_scatter(x, group, int(dim))
    return collectives.all_to_all(x, group, received_rows(ranks, rank), sent_rows(ranks, rank))


# --- written out: every rank's input to every rank's result ------------------------------------------------


def written_out(operation: str, xs: Tensors) -> Tensors:
    name, _, dim = operation.partition(" ")
    ranks = len(xs)
    if name == "all_gather":
        return [torch.cat(xs, int(dim))] * ranks
    if name == "reduce_scatter":
        return list(torch.stack(xs).sum(0).chunk(ranks, int(dim)))
    dealt = [x.split(sent_rows(ranks, rank)) for rank, x in enumerate(xs)]
    return [torch.cat([dealt[source][rank] for source in range(ranks)]) for rank in range(ranks)]


DIMS = (0, 1, -1)
OPERATIONS = [*(f"{name} {dim}" for name in ("all_gather", "reduce_scatter") for dim in DIMS), "all_to_all"]


def results(world: World) -> dict[str, tuple[Tensor, Tensor]]:
    """Of every operation, this rank's result, and the gradient of its input when each element of every rank's
    result is weighed differently.
    """
    group, ranks, rank = dist.group.WORLD, world.size, world.rank
    found = {}
    for operation in OPERATIONS:
        x = values(rank, shape_on(operation, ranks, rank)).requires_grad_()
        y = run_one(operation, x, group, rank, ranks)
        (y * values(rank, tuple(y.shape), salt=1)).sum().backward()
        assert x.grad is not None
        found[operation] = y.detach(), x.grad
    for name, function, salt in (
        ("copy_to_all", collectives.copy_to_all, rank + 1),  # the same input, used differently
        ("all_reduce", collectives.all_reduce, 1),  # different inputs, their sum used in the same way
    ):
        x = values(0 if name == "copy_to_all" else rank, (3, 5)).requires_grad_()
        y = function(x, group)
        (y * values(0, (3, 5), salt=salt)).sum().backward()
        assert x.grad is not None
        found[name] = y.detach(), x.grad
    largest = collectives.summed(values(rank, (7,)), group, "max")
    found["max"] = largest, torch.zeros(())
    return found


@cache
def by_rank(ranks: int) -> list[dict[str, tuple[Tensor, Tensor]]]:
    return on_ranks(results, ranks)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_result_and_derivative_are_those_written_out(operation: str, ranks: int) -> None:
    xs = [values(rank, shape_on(operation, ranks, rank)).requires_grad_() for rank in range(ranks)]
    ys = written_out(operation, xs)
    total = sum((y * values(rank, tuple(y.shape), salt=1)).sum() for rank, y in enumerate(ys))
    assert isinstance(total, Tensor)
    total.backward()
    for found, x, y in zip(by_rank(ranks), xs, ys, strict=True):
        assert x.grad is not None
        assert_same(found[operation][0], y.detach())
        assert_same(found[operation][1], x.grad)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_copy_sums_what_its_users_want(ranks: int) -> None:
    wanted = torch.stack([values(0, (3, 5), salt=rank + 1) for rank in range(ranks)]).sum(0)
    for found in by_rank(ranks):
        assert_same(found["copy_to_all"][0], values(0, (3, 5)))
        assert_same(found["copy_to_all"][1], wanted)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_hands_its_gradient_to_every_term(ranks: int) -> None:
    total = torch.stack([values(rank, (3, 5)) for rank in range(ranks)]).sum(0)
    for found in by_rank(ranks):
        assert_same(found["all_reduce"][0], total)
        assert_same(found["all_reduce"][1], values(0, (3, 5), salt=1))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_largest_of_all_ranks(ranks: int) -> None:
    expected = torch.stack([values(rank, (7,)) for rank in range(ranks)]).amax(0)
    for found in by_rank(ranks):
        assert torch.equal(found["max"][0], expected)


def sent_as_it_lies(world: World, shape: tuple[int, ...]) -> tuple[Tensor, list[bool]]:
    """A gather over gloo, and whether each tensor that is exchanged for it is contiguous."""
    exchange, seen = functional.all_to_all_single, []

    def looked_at(x: Tensor, *others: object) -> Tensor:
        seen.append(x.is_contiguous())
        result: Tensor = exchange(x, *others)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "all_to_all_single", looked_at)
        return collectives.gathered(values(world.rank, shape), dist.group.WORLD), seen


@pytest.mark.parametrize("shape", [(1, 4), (3, 4)])
def test_what_is_exchanged_is_contiguous(shape: tuple[int, ...]) -> None:
    """Torch 2.11 refuses any other; 2.13 makes a copy of it."""
    for found, seen in on_ranks(sent_as_it_lies, 2, shape):
        assert_same(found, torch.cat([values(rank, shape) for rank in range(2)]))
        assert seen == [True]


def narrow_sum(world: World, dtype: torch.dtype) -> Tensor:
    return collectives.scattered(values(world.rank, (4, 64)).to(dtype), dist.group.WORLD)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_reduce_scatter_of_narrow_numbers_rounds_once(dtype: torch.dtype) -> None:
    exact = torch.stack([values(rank, (4, 64)).to(dtype).double() for rank in range(4)]).sum(0)
    found = torch.cat(on_ranks(narrow_sum, 4, dtype))
    assert found.dtype == dtype
    off = (found - exact).abs() - torch.finfo(dtype).eps / 2 * exact.abs()
    assert off.max() <= 4 * 2**-24 * exact.abs().max()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: collectives.all_gather(x, None, 1),
        lambda x: collectives.reduce_scatter(x, None, 1),
        lambda x: collectives.copy_to_all(x, None),
        lambda x: collectives.all_reduce(x, None),
        lambda x: collectives.all_to_all(x, None, [3], [3]),
        lambda x: collectives.gathered(x, None),
        lambda x: collectives.scattered(x, None),
        lambda x: collectives.summed(x, None),
        lambda x: collectives.exchanged(x, None, [3], [3]),
    ],
)
def test_a_rank_alone_sends_nothing(function: Callable[[Tensor], Tensor]) -> None:
    x = values(0, (3, 4))
    assert function(x) is x
