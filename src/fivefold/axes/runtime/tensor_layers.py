"""The layers of a model as one of several tp ranks computes them: with its part of the matrices.

Parameters are DTensors, so that whoever shards, saves or measures them knows which part of a whole they are.
Layers compute with plain tensors, this rank's parts, and say themselves what is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fivefold.comm.collectives import Group, all_gather, all_reduce, copy_to_all, reduce_scatter
from fivefold.models.moe import Router


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, to compute with.

    Its gradient comes back as this rank made it, even where that is only a share of the whole gradient.
    """
    assert isinstance(parameter, DTensor)
    part: Tensor = parameter.to_local(grad_placements=parameter.placements)
    return part


def part_of(whole: Tensor, cuts: Sequence[int | None], devices: DeviceMesh) -> nn.Parameter:
    """This rank's part of a parameter, as a DTensor on `devices`.

    cuts  along which dimension of the parameter each dimension of the mesh cuts; None where it does not
    """
    part = whole.detach()
    for axis, dimension in enumerate(cuts):
        if dimension is not None:
            part = part.chunk(devices.size(axis), dimension)[devices.get_local_rank(axis)]
    placements = [Replicate() if dimension is None else Shard(dimension) for dimension in cuts]
    shape, stride = whole.shape, whole.stride()
    part = part.contiguous()
    return nn.Parameter(
        DTensor.from_local(part, devices, placements, run_check=False, shape=shape, stride=stride)
    )


@dataclass(frozen=True)
class Stream:
    """How tp ranks hold the residual stream between layers: [B, S/tp, dim] each, or each all of it."""

    group: Group
    ranks: int
    rank: int
    sequence_parallel: bool

    def enter(self, x: Tensor) -> Tensor:
        """From the stream into a layer that the ranks compute together: all tokens, [B, S, dim]."""
        if self.sequence_parallel:
            return all_gather(x, self.group, dim=1).contiguous()  # else each matrix product makes a copy
        return copy_to_all(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """From such a layer back into the stream: the sum over ranks of their partial results [B, S, dim]."""
        if self.sequence_parallel:
            return reduce_scatter(x, self.group, dim=1)
        return all_reduce(x, self.group)


class Column(nn.Module):
    """A linear layer of which each rank computes some outputs.

    rows  where every rank holds the whole matrix: the rows of it that this rank uses
    """

    def __init__(self, linear: nn.Linear, rows: slice | None = None):
        super().__init__()
        self.weight, self.bias, self.rows = linear.weight, linear.bias, rows

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, in] -> [B, S, this rank's outputs]."""
        return F.linear(x, *self.used_part())

    def used_part(self) -> tuple[Tensor, Tensor | None]:
        """The rows of weight and bias that this rank computes with: [out, in] and [out]."""
        weight, bias = local(self.weight), None if self.bias is None else local(self.bias)
        if self.rows is None:
            return weight, bias
        return weight[self.rows], None if bias is None else bias[self.rows]


class Row(nn.Module):
    """A linear layer of which each rank has some inputs, and whose result goes to the residual stream."""

    def __init__(self, linear: nn.Linear, stream: Stream):
        super().__init__()
        self.weight, self.bias, self.stream = linear.weight, linear.bias, stream

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, this rank's inputs] -> the residual stream's part of [B, S, out]."""
        whole = self.stream.leave(F.linear(x, local(self.weight)))
        return whole if self.bias is None else whole + local(self.bias)


class PartialRow(nn.Module):
    """A linear layer of which each rank has some inputs, and whose partial results are summed later.

    So that the sum has the bias once, each rank adds its share of it.
    """

    def __init__(self, linear: nn.Linear, ranks: int):
        super().__init__()
        self.weight, self.bias, self.ranks = linear.weight, linear.bias, ranks

    def forward(self, x: Tensor) -> Tensor:
        """x [..., this rank's inputs] -> [..., out], to be summed over ranks."""
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias) / self.ranks)


class WholeRouter(nn.Module):
    """A router that every rank has and computes whole, as `models.moe.Router`."""

    def __init__(self, router: Router):
        super().__init__()
        self.weight = router.weight

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, dim] -> [B, S, E]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), local(self.weight).to(wide))


class Norm(nn.Module):
    """A norm over the last dimension; with a `stream`, the one through which a layer is entered."""

    def __init__(self, norm: nn.RMSNorm | nn.LayerNorm, stream: Stream | None = None):
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias if isinstance(norm, nn.LayerNorm) else None
        self.is_rms, self.shape = isinstance(norm, nn.RMSNorm), list(norm.normalized_shape)
        self.eps, self.stream = norm.eps, stream

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]; at an entrance from the stream's part of [B, S, dim] to all of it."""
        weight, bias = local(self.weight), None if self.bias is None else local(self.bias)
        if self.is_rms:
            normed = F.rms_norm(x, self.shape, weight, self.eps)
        else:
            normed = F.layer_norm(x, self.shape, weight, bias, self.eps or 0.0)
        return normed if self.stream is None else self.stream.enter(normed)


class Positions(nn.Module):
    """A table of learned positions, added to this rank's part of the residual stream."""

    def __init__(self, table: nn.Embedding, stream: Stream):
        super().__init__()
        self.weight, self.stream = table.weight, stream

    def forward(self, positions: Tensor) -> Tensor:
        """positions [S] or [B, S] -> the stream's part of [S, dim] or [B, S, dim]."""
        if self.stream.sequence_parallel:
            positions = positions.chunk(self.stream.ranks, dim=-1)[self.stream.rank]
        return F.embedding(positions, local(self.weight))
