"""An expert layer whose experts, or the matrices of each, are spread over ranks: what is different then."""

import torch
from torch import Tensor, nn

from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.runtime.tensor_layers import local, part_of
from fivefold.axes.tensor import split_dimension
from fivefold.comm.collectives import Group, all_to_all, exchanged
from fivefold.models.grouped import grouped_linear
from fivefold.models.moe import Experts, StackedLinear, permute
from fivefold.models.spec import ModelSpec


def share_parameters(experts: Experts, spec: ModelSpec, mesh: Mesh) -> None:
    """Replace every parameter by a DTensor that holds this rank's part, on the mesh of ep (and tp)."""
    devices = mesh.along("ep", "tp")
    for path, module in experts.named_modules():
        for name, whole in list(module.named_parameters(recurse=False)):
            over_tp = split_dimension(spec, f"blocks.0.mlp.experts.{path}.{name}", mesh.layout.tp)
            module.register_parameter(name, part_of(whole, [0, over_tp][: devices.ndim], devices))


class LocalStackedLinear(nn.Module):
    """A stacked linear layer whose parameters are DTensors, computed with this rank's part of them.

    ranks  how many have some of the inputs each, and results that are summed later: each adds its share of
           the bias, so that the sum has it once
    """

    def __init__(self, stacked: StackedLinear, ranks: int = 1):
        super().__init__()
        self.weight, self.bias, self.ranks = stacked.weight, stacked.bias, ranks

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [N, its inputs], sorted by expert; counts [this rank's experts] -> [N, its outputs]."""
        bias = None if self.bias is None else local(self.bias) / self.ranks
        return grouped_linear(rows, local(self.weight), bias, counts)


def compute_locally(experts: Experts, tp: int) -> None:
    """Let `experts`, whose parameters are DTensors, compute with this rank's parts: partial sums under tp."""
    if experts.gate is not None:
        experts.set_submodule("gate", LocalStackedLinear(experts.gate))
    experts.set_submodule("up", LocalStackedLinear(experts.up))
    experts.set_submodule("down", LocalStackedLinear(experts.down, tp))


class ExchangingDispatch(nn.Module):
    """Takes rows to the ranks that hold their experts, and what the experts made of them back."""

    def __init__(self, group: Group, ranks: int):
        super().__init__()
        self.group, self.ranks = group, ranks

    def forward(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """experts  maps (rows, counts) of this rank's experts to rows
        rows     [N, dim], sorted by expert, of all experts
        counts   [E] int64
        returns  [N, dim], in the same order
        """
        leaving = counts.view(self.ranks, -1)  # [ranks, E / ranks]
        ones = [1] * self.ranks
        coming = exchanged(leaving, self.group, ones, ones)
        # The one moment at which the host must wait: it has to know how much to receive from whom.
        sent, received = torch.stack([leaving.sum(1), coming.sum(1)]).tolist()

        rows = all_to_all(rows, self.group, received, sent)
        # They come sorted by rank, and by expert for each rank.
        experts_here = torch.arange(coming.shape[1], device=rows.device).repeat(self.ranks)
        expert = experts_here.repeat_interleave(coming.flatten(), output_size=len(rows))
        order = expert.argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=rows.device))
        rows = experts(permute(rows, order, place), coming.sum(0))
        return all_to_all(permute(rows, place, order), self.group, sent, received)
