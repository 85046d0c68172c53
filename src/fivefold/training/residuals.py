"""What error feedback keeps, as state of the run: saved, taken up, and dealt out anew under another layout.

A residual belongs to the rank that rounded, but what counts is their sum: that much of the gradients has not
been applied yet. Ranks that sum the same gradients keep one each, of the same whole parameter. So a
checkpoint has several of each parameter, by who keeps them. Taken up by the same keepers, a run goes on bit
for bit. Taken up by others, each gets an equal share of the sum.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fivefold.axes.layout import Layout, Place
from fivefold.axes.pieces import Piece
from fivefold.axes.runtime.compressed_reduction import Member, ReduceScatter, ReplicaSum
from fivefold.axes.runtime.data_split import is_data_axis
from fivefold.comm.buckets import BucketedAllReduce
from fivefold.comm.compression import Residual
from fivefold.training.weights import Weights

STATE = "residual"
"""What their names begin with in a checkpoint."""


class Kept(Protocol):
    """The part of a residual that belongs to one parameter."""

    def read(self) -> Tensor: ...

    def write(self, value: Tensor) -> None: ...


@dataclass(frozen=True)
class Flat:
    """It lies in one run, from `start` on, and has this shape."""

    residual: Residual
    start: int
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        size = torch.Size(self.shape).numel()
        return self.residual.value[self.start : self.start + size].view(self.shape)

    def write(self, value: Tensor) -> None:
        self.read().copy_(value)


@dataclass(frozen=True)
class Rows:
    """It lies as FSDP reduces it: a padded shard for each of `ranks` ranks, in their flat buffers."""

    residual: Residual
    ranks: int
    member: Member

    def _shards(self) -> list[Tensor]:
        """Of each rank, its shard, without the padding: views."""
        member, shape = self.member, list(self.member.whole)
        rows = self.residual.value.view(self.ranks, -1)[:, member.start : member.start + member.size]
        found = []
        for rank, row in enumerate(rows):
            left = member.whole[member.dim] - rank * member.rows
            shape[member.dim] = max(0, min(member.rows, left))
            found.append(row[: torch.Size(shape).numel()].view(shape))
        return found

    def read(self) -> Tensor:
        return torch.cat(self._shards(), self.member.dim)

    def write(self, value: Tensor) -> None:
        shards = self._shards()
        sizes = [shard.shape[self.member.dim] for shard in shards]
        for shard, part in zip(shards, value.split(sizes, self.member.dim), strict=True):
            shard.copy_(part)


class Residuals:
    """All residuals of this rank, by parameter and keeper."""

    def __init__(
        self,
        weights: Weights,
        mine: list[Piece],
        place: Place,
        layout: Layout,
        buckets: Iterable[BucketedAllReduce],
        reductions: Iterable[ReduceScatter | ReplicaSum],
    ):
        self.weights, self.pieces, self.place, self.layout = weights, mine, place, layout
        self.all: list[Residual] = []
        self.kept: dict[str, tuple[int, Kept]] = {}  # by keeper and parameter: of which master, and where
        for bucketed in buckets:
            for bucket, residual in zip(bucketed.buckets, bucketed.residuals, strict=False):
                self.all.append(residual)
                start = 0
                for index in bucket:
                    master = weights.masters[index]
                    self._keep(index, "whole", Flat(residual, start, tuple(master.shape)))
                    start += master.numel()
        index_of = {id(parameter): index for index, parameter in enumerate(weights.parameters)}
        for reduction in reductions:
            if reduction.residual is None:
                continue
            self.all.append(reduction.residual)
            for member in reduction.members:
                index = index_of[id(member.parameter)]
                if isinstance(reduction, ReduceScatter):
                    self._keep(index, "whole", Rows(reduction.residual, reduction.ranks, member))
                else:
                    shape = tuple(weights.masters[index].shape)
                    self._keep(index, "shard", Flat(reduction.residual, member.start, shape))

    def _keep(self, index: int, what: str, kept: Kept) -> None:
        """What a rank keeps of one sum: of gradients before they are sharded, or of its shard.

        Ranks that keep parts of the same tensor have one name for it: those that split it along tp or ep.
        Those with a copy each of the same gradient do, too; but not those that each compute a share of it.
        """
        name, piece, place = self.weights.names[index], self.pieces[index], self.place
        keeper = [place.pp, place.dp_replicate]
        if what == "whole":
            rank = place.dp_shard * self.layout.cp + place.cp
            keeper.append(rank // self.layout.ep if piece.expert else rank)
        if piece.partial:
            keeper.append(place.tp)
        here = f"{what}-{'-'.join(map(str, keeper))}"
        if f"{here}.{name}" in self.kept:  # two stages of this rank use a tied embedding
            here += "-again"
        self.kept[f"{here}.{name}"] = (index, kept)

    def forget(self) -> None:
        """After a step that was not taken: what its rounding left out is of no use."""
        for residual in self.all:
            residual.forget()

    def scale(self, factor: float) -> None:
        """Gradients are multiplied by another loss scale from now on."""
        for residual in self.all if factor != 1 else []:
            residual.value.mul_(factor)

    def state(self) -> dict[str, Tensor]:
        """By keeper and parameter, as distributed tensors where axes other than the data axis split it."""
        return {name: self._spread(name, kept.read()) for name, (_, kept) in self.kept.items()}

    def _spread(self, name: str, value: Tensor) -> Tensor:
        index, _ = self.kept[name]
        if name.startswith("shard"):
            return self.weights.whole_like(index, value)
        parameter = self.weights.parameters[index]
        if not isinstance(parameter, DTensor):
            return value
        placements = [
            Replicate() if is_data_axis(parameter, axis) else placement
            for axis, placement in enumerate(parameter.placements)
        ]
        shape, stride = parameter.shape, parameter.stride()
        mesh = parameter.device_mesh
        return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)

    def load(
        self, stored: Iterable[str], ours: Iterable[str], read: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        """Take up what a checkpoint has.

        stored  the names there, and `ours` of all ranks: as in `state`
        read    fills tensors, given by name, with what is stored
        """
        there, everyone = set(stored), set(ours)
        keepers = Counter(map(parameter_of, everyone))
        for name, (_, kept) in self.kept.items():
            parameter, value = parameter_of(name), kept.read().clone()
            if there == everyone:
                read({name: self._spread(name, value)})
                kept.write(value)
                continue
            total = torch.zeros_like(value, dtype=torch.float32)
            for theirs in sorted(each for each in there if parameter_of(each) == parameter):
                read({theirs: self._spread(name, value)})
                total += value
            kept.write(total / keepers[parameter])


def parameter_of(name: str) -> str:
    """`whole-0-0-3.head.norm.weight` -> `head.norm.weight`."""
    return name.partition(".")[2]
