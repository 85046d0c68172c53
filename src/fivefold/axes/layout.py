"""Degrees of parallelism, and the mesh of ranks they span.

The mesh order is (pp, dp_replicate, dp_shard, cp, tp), outermost first: neighbouring ranks differ in
`tp`, so the chattiest axis sits on the fastest links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from fivefold.config import Job

MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Layout:
    """How many ways each axis splits the work. The product over the mesh order is the rank count."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 0

    @classmethod
    def of(cls, job: Job) -> Layout:
        """The layout of a resolved job."""
        section = job.layout
        if section.dp_replicate is None or section.dp_shard is None or section.zero is None:
            raise ValueError("the job's layout is still open: call fivefold.config.resolve first")
        return cls(
            section.dp_replicate,
            section.dp_shard,
            section.cp,
            section.tp,
            section.pp,
            section.ep,
            section.zero,
        )

    @property
    def ranks(self) -> int:
        return math.prod(getattr(self, axis) for axis in MESH_ORDER)

    @property
    def data_ranks(self) -> int:
        """How many ways the batch is split."""
        return self.dp_replicate * self.dp_shard

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split anything, outermost first."""
        return tuple(axis for axis in MESH_ORDER if getattr(self, axis) > 1)

    @property
    def all_axes(self) -> str:
        """The name of the group of all ranks: the axes it spans."""
        return "*".join(self.axes)

    def __str__(self) -> str:
        degrees = [f"{axis}{getattr(self, axis)}" for axis in self.axes]
        if self.zero:
            degrees.append(f"zero{self.zero}")
        return " x ".join(degrees) or "one process"


class Mesh:
    """The process groups of a layout: one for each axis that splits anything.

    With one rank there are none, and nothing communicates.
    """

    def __init__(self, layout: Layout, device: torch.device):
        self.layout = layout
        self.devices: DeviceMesh | None = None
        if layout.ranks > 1:
            from torch.distributed.device_mesh import init_device_mesh

            # Axes of one rank are left out: each would cost a process group, with threads or buffers.
            shape = tuple(getattr(layout, axis) for axis in layout.axes)
            self.devices = init_device_mesh(device.type, shape, mesh_dim_names=layout.axes)

    def along(self, *axes: str) -> DeviceMesh:
        """The part of the mesh that this rank shares along the named axes."""
        if self.devices is None:
            raise ValueError("one process has no mesh")
        return self.devices[axes if len(axes) > 1 else axes[0]]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along `axis` only; None when there are no others."""
        if self.devices is None or axis not in self.layout.axes:
            return None
        return self.devices.get_group(axis)

    @property
    def data_rank(self) -> int:
        """Which share of the batch is this rank's, from 0 to `layout.data_ranks` - 1."""
        return self.position("dp_replicate") * self.layout.dp_shard + self.position("dp_shard")

    def position(self, axis: str) -> int:
        """Where this rank stands along `axis`, from 0."""
        if self.devices is None or axis not in self.layout.axes:
            return 0
        return int(self.devices.get_local_rank(axis))

    def name_of(self, group: dist.ProcessGroup) -> str:
        """The axis along which `group` lies; for all ranks together, every axis there is, joined by `*`."""
        import torch.distributed as dist

        if group == dist.group.WORLD:
            return self.layout.all_axes
        for axis in MESH_ORDER:
            if self.group(axis) == group:
                return axis
        raise ValueError(f"group {group.group_name} is not of this mesh")
