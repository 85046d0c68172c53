"""The layers of a model as one of several tp ranks computes them: with its part of the matrices.

Parameters are DTensors, so that whoever shards, saves or measures them knows which part of a whole they are.
Layers compute with plain tensors, this rank's parts, and say themselves what is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fivefold.axes.expert import is_expert
from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.tensor import split_dimension
from fivefold.comm.collectives import Group, all_gather, all_reduce, copy_to_all, reduce_scatter
from fivefold.models.decoder import Decoder
from fivefold.models.norm import OffsetRMSNorm, offset_rms_norm

Compute = Callable[..., Tensor]


def share_parameters(model: Decoder, mesh: Mesh, *, spread: bool) -> None:
    """Replace parameters by DTensors of this rank's parts, on the meta device; tied ones once.

    spread  those of experts under ep, shared by ep (and tp) ranks; else all others, shared by tp ranks
    """
    devices = mesh.along("ep", "tp") if spread else mesh.along("tp")
    shared: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        if spread != (mesh.layout.ep > 1 and is_expert(f"{path}.")):
            continue
        for name, whole in list(module.named_parameters(recurse=False)):
            if whole not in shared:
                over_tp = split_dimension(model.spec, f"{path}.{name}", mesh.layout.tp)
                cuts = [0, over_tp][: devices.ndim] if spread else [over_tp]
                shared[whole] = _part_of(whole, cuts, devices)
            module.register_parameter(name, shared[whole])


def _part_of(whole: Tensor, cuts: list[int | None], devices: DeviceMesh) -> nn.Parameter:
    """This rank's part, if each dimension of the mesh cuts one of the parameter's; None where it does not."""
    part = whole.detach()
    for axis, dimension in enumerate(cuts):
        if dimension is not None:
            part = part.chunk(devices.size(axis), dimension)[devices.get_local_rank(axis)]
    placements = [Replicate() if dimension is None else Shard(dimension) for dimension in cuts]
    shape, stride, part = whole.shape, whole.stride(), part.contiguous()
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


class LocalLayer(nn.Module):
    """Takes the place of a layer, with its parameters, and computes with this rank's parts of them.

    compute  makes the result of the layer's first input, weight and bias, and its other inputs
    linear   of a layer that multiplies: how; it then comes first among what `compute` is given
    rows     where every rank holds the whole matrix: the rows of it that this rank uses
    then     takes the result on: at an entrance from the stream's part to all of it
    """

    def __init__(
        self,
        layer: Any,
        compute: Compute,
        rows: slice | None = None,
        then: Compute | None = None,
        linear: Compute | None = None,
    ):
        super().__init__()
        self.weight, self.bias = layer.weight, getattr(layer, "bias", None)
        self.compute, self.rows, self.then, self.linear = compute, rows, then, linear

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """The inputs that the layer takes, or this rank's part of them -> the same of its result."""
        how = () if self.linear is None else (self.linear,)
        result = self.compute(*how, x, *self.used_parts(), *others)
        return result if self.then is None else self.then(result)

    def used_parts(self) -> tuple[Tensor, Tensor | None]:
        """What this rank computes with of weight and bias: [out, in] and [out].

        Gradients come back as this rank made them, even where that is only a share of the whole gradient.
        """
        return self._used_part(self.weight), None if self.bias is None else self._used_part(self.bias)

    def _used_part(self, parameter: DTensor) -> Tensor:
        part: Tensor = parameter.to_local(grad_placements=parameter.placements)
        return part if self.rows is None else part[self.rows]


# --- how they compute --------------------------------------------------------------------------------------


def column(linear: Compute, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer of which each rank makes some outputs: x [B, S, in] -> [B, S, this rank's outputs]."""
    return linear(x, weight, bias)


def row(stream: Stream, linear: Compute, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer of which each rank has some inputs, and whose result goes to the residual stream.

    x [B, S, this rank's inputs] -> the stream's part of [B, S, out]
    """
    whole = stream.leave(linear(x, weight))
    return whole if bias is None else whole + bias


def partial_sum(
    ranks: int, linear: Compute, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Tensor
) -> Tensor:
    """A `linear` layer of which each of `ranks` has some inputs, and whose results are summed later.

    So that the sum has the bias once, each rank adds its share of it.
    """
    return linear(x, weight, None if bias is None else bias / ranks, *others)


def router(x: Tensor, weight: Tensor, bias: None) -> Tensor:
    """As `models.moe.Router`: x [B, S, dim] -> [B, S, E]. Every rank has and computes it whole."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide))


def norm(kind: type[nn.Module], eps: float, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Over the last dimension: x [..., D] -> [..., D]."""
    if kind is OffsetRMSNorm:
        return offset_rms_norm(x, weight, eps)
    if kind is nn.RMSNorm:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def positions(stream: Stream, places: Tensor, weight: Tensor, bias: None) -> Tensor:
    """A table of learned positions: places [S] or [B, S] -> the stream's part of [S, dim] or [B, S, dim]."""
    if stream.sequence_parallel:
        places = places.chunk(stream.ranks, dim=-1)[stream.rank]
    return F.embedding(places, weight)
