"""Collectives inside a forward pass, each with the collective that is its derivative.

    forward                         backward
    all_gather along a dimension    reduce_scatter along it
    reduce_scatter                  all_gather
    copy (nothing is sent)          all_reduce
    all_reduce                      copy
    all_to_all                      all_to_all with the split sizes exchanged

Each takes a process group, or None for a group of one, where it does nothing. They are built on torch's
functional collectives, which return new tensors: compilers and selective recomputation understand those.
Over gloo, tensors of a GPU are taken to the CPU and back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.comm.compat import functional
from fivefold.operators import operator

Group = dist.ProcessGroup | None


# --- without derivatives -----------------------------------------------------------------------------------


def gathered(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Every rank's `x`, one after the other along `dim`."""
    if group is None:
        return x
    first = x.movedim(dim, 0).contiguous()
    size, name = group.size(), group.group_name
    if _over_gloo(first, group):
        everyone: Tensor = gather_by_exchange(first, size, name)
        return everyone.movedim(0, dim)
    run = functional.all_gather_into_tensor
    return _sent(first, group, lambda t: run(t, size, name)).movedim(0, dim)


def scattered(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """The sum of every rank's `x`, cut along `dim`: each rank gets its piece."""
    if group is None:
        return x
    first = x.movedim(dim, 0).contiguous()
    size, name = group.size(), group.group_name
    if _over_gloo(first, group):
        piece: Tensor = scatter_by_exchange(first, size, name)
        return piece.movedim(0, dim)
    run = functional.reduce_scatter_tensor
    return _sent(first, group, lambda t: run(t, "sum", size, name)).movedim(0, dim)


def summed(x: Tensor, group: Group, operation: str = "sum") -> Tensor:
    """The sum (or "max") of every rank's `x`, on every rank."""
    if group is None:
        return x
    name = group.group_name
    return _sent(x.contiguous(), group, lambda t: functional.all_reduce(t, operation, name))


def exchanged(x: Tensor, group: Group, received: Sequence[int], sent: Sequence[int]) -> Tensor:
    """Rows of `x` dealt out: `sent[i]` of them to rank i, `received[i]` from it, in the ranks' order."""
    if group is None:
        return x
    name = group.group_name
    run = functional.all_to_all_single
    return _sent(x.contiguous(), group, lambda t: run(t, list(received), list(sent), name))


def started_exchange(
    x: Tensor, group: Group, received: Sequence[int], sent: Sequence[int]
) -> Callable[[], Tensor]:
    """As `exchanged`, on its way when this returns: what it returns waits for it."""
    if group is None:
        return lambda: x
    staged = x.device.type == "cuda" and dist.get_backend(group) == "gloo"
    run = functional.all_to_all_single
    flying = run(x.cpu() if staged else x, list(received), list(sent), group.group_name)

    def arrived() -> Tensor:
        result: Tensor = functional.wait_tensor(flying)
        return result.to(x.device) if staged else result

    return arrived


def _over_gloo(x: Tensor, group: dist.ProcessGroup) -> bool:
    return x.device.type == "cpu" and dist.get_backend(group) == "gloo"


# Gloo's own gather and reduce-scatter take up to twice as long as its all-to-all of as many bytes.
@operator(
    lambda x, size, group: x.new_empty((size * x.shape[0], *x.shape[1:])),
    collective="all_gather_into_tensor",
)
def gather_by_exchange(x: Tensor, size: int, group: str) -> Tensor:
    """Every rank's `x`, one after the other: each rank sends its own to each."""
    # Copies for real: a view of one row as many is not contiguous, and torch 2.11 takes nothing else.
    return _exchange(torch.cat([x] * size), size, group)


@operator(
    lambda x, size, group: x.new_empty((x.shape[0] // size, *x.shape[1:])),
    collective="reduce_scatter_tensor",
)
def scatter_by_exchange(x: Tensor, size: int, group: str) -> Tensor:
    """The sum of every rank's `x`, cut into pieces: each rank is sent all of its own, and adds them up."""
    return _exchange(x, size, group).view(size, -1, *x.shape[1:]).sum(0)


def _exchange(x: Tensor, size: int, group: str) -> Tensor:
    each = [x.shape[0] // size] * size
    result: Tensor = functional.wait_tensor(functional.all_to_all_single(x, each, each, group))
    return result


def _sent(x: Tensor, group: dist.ProcessGroup, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Run a collective and wait for it, through the CPU where the group cannot reach the device."""
    here = x.device
    staged = here.type == "cuda" and dist.get_backend(group) == "gloo"
    result: Tensor = functional.wait_tensor(run(x.cpu() if staged else x))
    return result.to(here) if staged else result


# --- with derivatives --------------------------------------------------------------------------------------


def all_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Every rank's `x`, one after the other along `dim`."""
    return x if group is None else _applied(_AllGather, x, group, dim)


def reduce_scatter(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """The sum of every rank's `x`, cut along `dim`: each rank gets its piece."""
    return x if group is None else _applied(_ReduceScatter, x, group, dim)


def copy_to_all(x: Tensor, group: Group) -> Tensor:
    """`x`, which is equal on every rank and used differently by each: their gradients add up."""
    return x if group is None else _applied(_CopyToAll, x, group)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of every rank's `x`, used in the same way by each."""
    return x if group is None else _applied(_AllReduce, x, group)


def all_to_all(x: Tensor, group: Group, received: Sequence[int], sent: Sequence[int]) -> Tensor:
    """Rows of `x` dealt out: `sent[i]` of them to rank i, `received[i]` from it, in the ranks' order."""
    return x if group is None else _applied(_AllToAll, x, group, list(received), list(sent))


def _applied(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return scattered(grads[0], ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return scattered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gathered(grads[0], ctx.group, ctx.dim), None, None


class _CopyToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return summed(grads[0], ctx.group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, received: list[int], sent: list[int]
    ) -> Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        return exchanged(x, group, received, sent)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return exchanged(grads[0], ctx.group, ctx.sent, ctx.received), None, None, None
