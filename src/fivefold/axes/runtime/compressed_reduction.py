"""FSDP's sums of gradients in fewer bits: its reduce-scatter, and the sum over replicas (HSDP) behind it.

FSDP reduces group by group, each a module's own parameters, laid out in one flat buffer: for each rank its
shard of every parameter, one after the other, padded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fivefold.axes.runtime.data_split import is_data_axis, local_slab
from fivefold.axes.runtime.mesh import Mesh
from fivefold.comm.compat import sharded_parameters
from fivefold.comm.compression import CompressedSum, Residual, reduce_scattered
from fivefold.config import Job
from fivefold.ledger.setup import Setup


@dataclass(frozen=True)
class Member:
    """A parameter of a group, as FSDP reduces it.

    whole  the shape of its gradient before the reduce-scatter
    dim    along which ranks shard it
    rows   of a shard along `dim`, padding included
    start  where it begins in a rank's shard of the flat buffer, and `size` elements it has there
    """

    parameter: DTensor
    whole: tuple[int, ...]
    dim: int
    rows: int
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.whole) // max(1, self.whole[self.dim]) * self.rows


class ReduceScatter:
    """What FSDP calls to reduce a group: torch's own interface (`set_custom_reduce_scatter`).

    residual  with error feedback: of the whole flat buffer
    """

    def __init__(self, members: list[Member], ranks: int, kind: str, feedback: bool):
        self.members, self.ranks, self.kind = members, ranks, kind
        size = ranks * sum(member.size for member in members)
        self.residual = Residual(size, members[0].parameter.device) if feedback else None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """input_tensor [ranks x n] -> output_tensor [n]: sums, whatever `op`, since gradients are summed."""
        output_tensor.copy_(reduce_scattered(input_tensor, group, self.kind, self.residual))


class ReplicaSum:
    """Sums a group's shards over the replicas, after the last micro-batch; FSDP's all-reduce hook.

    last  whether the micro-batch that is now reduced is the step's last: `before_micro_batch` says so
    """

    def __init__(self, members: list[Member], group: dist.ProcessGroup, kind: str, feedback: bool):
        self.members, self.group, self.kind, self.last = members, group, kind, True
        size = sum(member.size for member in members)
        self.residual = Residual(size, members[0].parameter.device) if feedback else None

    @torch.no_grad()
    def __call__(self, shard: Tensor) -> None:
        """shard  [n], what a reduce-scatter has left; FSDP adds it to the gradients that are there"""
        if not self.last:
            return
        for member in self.members:
            if member.parameter.grad is not None:  # of the micro-batches before
                sums = member.parameter.grad.to_local().flatten()  # type: ignore[attr-defined]
                shard[member.start : member.start + sums.numel()] += sums
                sums.zero_()
        flight = CompressedSum(shard, self.group, self.kind, self.residual)
        flight.add()
        shard.copy_(flight.result())


def compress(parts: Sequence[torch.nn.Module], mesh: Mesh, job: Job) -> list[ReduceScatter | ReplicaSum]:
    """Let FSDP's sums of gradients travel as the job says; what now does them, in the order of modules."""
    setup, found = Setup.of(job), list[ReduceScatter | ReplicaSum]()
    kind, feedback = setup.compress, setup.error_feedback
    modules = (module for part in parts for module in part.modules())
    for module in modules:
        if not isinstance(module, FSDPModule) or not (members := _members(module)):
            continue
        ranks = _shards(members[0].parameter)[1]
        if setup.compresses_shards and ranks > 1:
            reduction = ReduceScatter(members, ranks, kind, feedback)
            module.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]
            found.append(reduction)
        if setup.compresses_replicas and (group := mesh.group("dp_replicate")) is not None:
            total = ReplicaSum(members, group, kind, feedback)
            module.set_all_reduce_hook(total)
            found.append(total)
    return found


def _members(module: FSDPModule) -> list[Member]:
    found, start = list[Member](), 0
    for parameter in sharded_parameters(module):
        dim, ranks = _shards(parameter)
        whole = local_slab(parameter, shards=False)[1]
        found.append(Member(parameter, whole, dim, math.ceil(whole[dim] / ranks), start))
        start += found[-1].size
    return found


def _shards(parameter: DTensor) -> tuple[int, int]:
    """Along which dimension data ranks shard a parameter, and how many they are."""
    for axis, placement in enumerate(parameter.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None and is_data_axis(parameter, axis):
            return dim, parameter.device_mesh.size(axis)
    raise ValueError("FSDP does not shard this parameter")
