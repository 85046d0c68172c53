"""The process groups of a layout."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fivefold.axes.layout import (
    EVERYONE,
    EXPERT_REPLICAS,
    EXPERT_SHARDS,
    REPLICAS,
    SHARDS,
    STAGE,
    Layout,
    Place,
    name_in,
)
from fivefold.comm.compat import concatenated, flattened


class Mesh:
    """The process groups of a layout: one for each axis that splits anything, and for those used together.

    With one rank there are none, and nothing communicates.
    """

    def __init__(self, layout: Layout, device: torch.device):
        self.layout = layout
        self.device = device
        self.place = Place()
        self.meshes: dict[str, DeviceMesh] = {}
        self.expert_meshes: dict[str, DeviceMesh] = {}
        self.everyone: dist.ProcessGroup | None = None  # all ranks of the layout; None: of the whole world
        if layout.ranks == 1:
            return
        self.place = layout.place(dist.get_rank())
        # Axes of one rank are left out: each would cost a process group, with threads or buffers.
        shape = tuple(getattr(layout, axis) for axis in layout.axes)
        self._devices = devices = init_device_mesh(device.type, shape, mesh_dim_names=layout.axes)
        self.meshes = {axis: devices[axis] for axis in layout.axes}
        together = name_in(layout, SHARDS if layout.zero else REPLICAS)
        if "*" in together:
            self.meshes[together] = flattened(devices, tuple(together.split("*")))
        if layout.ep == 1:
            return
        degrees = {
            "pp": layout.pp,
            "dp_replicate": layout.dp_replicate,
            EXPERT_SHARDS: layout.shard_ranks // layout.ep,
            "ep": layout.ep,
            "tp": layout.tp,
        }
        # FSDP wants a mesh for the experts even where no other rank holds the same ones.
        used = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis == EXPERT_SHARDS}
        devices = init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))
        self.expert_meshes = {axis: devices[axis] for axis in used}
        self.meshes |= {axis: devices[axis] for axis in ("ep", EXPERT_SHARDS)}
        if layout.zero == 0 and name_in(layout, EXPERT_REPLICAS) == EXPERT_REPLICAS:
            self.meshes[EXPERT_REPLICAS] = flattened(devices, ("dp_replicate", EXPERT_SHARDS))

    @cached_property
    def replica(self) -> Mesh:
        """The mesh of the ranks with this one's place along `dp_replicate`, as if there were no others.

        Every rank must call it: it may make a process group.
        """
        found, layout = copy(self), self.layout.replica
        found.__dict__.pop("stage", None)  # it has one of its own
        found.layout, found.place = layout, replace(self.place, dp_replicate=0)
        if layout.ranks > 1:
            together = name_in(layout, EVERYONE)
            if together not in self.meshes:
                self.meshes[together] = flattened(self._devices, layout.axes)
            found.everyone = self.meshes[together].get_group()
        crossing = [axes for axes in self.meshes if "dp_replicate" in axes]
        found.meshes = {axes: mesh for axes, mesh in self.meshes.items() if axes not in crossing}
        found.expert_meshes = {
            axes: mesh for axes, mesh in self.expert_meshes.items() if axes != "dp_replicate"
        }
        return found

    @cached_property
    def stage(self) -> dist.ProcessGroup | None:
        """The ranks with this one's place along `pp`: those that have its layers; None if alone.

        Every rank must call it: it may make a process group.
        """
        if self.layout.stage.ranks == 1:
            return None
        if self.layout.pp == 1:
            return self.everyone or dist.group.WORLD
        together = name_in(self.layout, STAGE)
        if together not in self.meshes:
            self.meshes[together] = flattened(self._devices, self.layout.stage.axes)
        return self.meshes[together].get_group()

    def along(self, *axes: str) -> DeviceMesh:
        """What this rank shares along the named axes, one dimension for each that splits anything.

        A name may be a group of axes that act as one: see `name_in`. With `ep` or EXPERT_SHARDS among them it
        is the mesh of the second way to cut the ranks.
        """
        meshes = self.expert_meshes if {"ep", EXPERT_SHARDS}.intersection(axes) else self.meshes
        return concatenated([meshes[axis] for axis in axes if axis in meshes])

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along `axis` (see `along`) only; None when there are none."""
        mesh = self.meshes.get(axis)
        return None if mesh is None else mesh.get_group()

    @property
    def data_rank(self) -> int:
        """Which share of the batch is this rank's, from 0 to `layout.data_ranks` - 1."""
        return self.place.dp_replicate * self.layout.dp_shard + self.place.dp_shard
