"""The tracer of `fivefold/comm/tracer.py`, with groups by the names that the ledger has for them."""

from __future__ import annotations

import torch.distributed as dist

from fivefold.axes.layout import EVERYONE, name_in
from fivefold.axes.runtime.mesh import Mesh
from fivefold.comm.tracer import Seen as Seen
from fivefold.comm.tracer import Tracer


class MessageTracer(Tracer):
    """As `Tracer`; `mesh` says whose process groups the messages travel in."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.mesh = mesh

    def name_of(self, group: dist.ProcessGroup) -> str:
        """The axis along which `group` lies; for all ranks together, every axis there is, joined by `*`."""
        if group == dist.group.WORLD:
            return name_in(self.mesh.layout, EVERYONE)
        for axis, mesh in (*self.mesh.meshes.items(), *self.mesh.expert_meshes.items()):
            if mesh.get_group() == group:
                return axis
        raise ValueError(f"group {group.group_name} is not of this mesh")
