"""Degrees of parallelism, the mesh of ranks they span, and its groups, in which messages travel.

The mesh order is (pp, dp_replicate, dp_shard, cp, tp), outermost first: neighbouring ranks differ in
`tp`, so the chattiest axis sits on the fastest links. Experts are spread over `ep` neighbours among the
dp_shard x cp ranks; that is a second way to cut the same ranks, not a further axis of the mesh.

A mesh leaves out axes of one rank: what is `dp_shard*cp` among many layouts is `cp` where dp_shard is 1.
Messages of many layouts at once bear the full names of groups; `name_in` gives that in one layout's mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from fivefold.config import Job

MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EVERYONE = "*".join(MESH_ORDER)
SHARDS = "dp_shard*cp"
"""Over which ZeRO 1 to 3 shard."""
EXPERT_SHARDS = "dp_shard*cp/ep"
"""Over which they shard experts: the ranks that hold the same ones."""
REPLICAS = "dp_replicate*cp"
"""Whose ranks hold equal weights under zero 0."""
EXPERT_REPLICAS = f"dp_replicate*{EXPERT_SHARDS}"
"""Whose ranks hold the same experts under zero 0."""
STAGE = "dp_replicate*dp_shard*cp*tp"
"""All ranks with the same layers, whatever they hold of these."""


@dataclass(frozen=True)
class Place:
    """Where one rank stands along each axis, from 0."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0

    @property
    def speaks_for_sequences(self) -> bool:
        """Whether it is the first of the ranks with the same sequences, which differ along cp, tp or pp."""
        return self.cp == self.tp == self.pp == 0


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
        degrees = {field.name: getattr(job.layout, field.name) for field in fields(cls)}
        if None in degrees.values():
            raise ValueError("the job's layout is still open: call fivefold.config.resolve first")
        return cls(**degrees)

    @property
    def ranks(self) -> int:
        return math.prod(getattr(self, axis) for axis in MESH_ORDER)

    @property
    def data_ranks(self) -> int:
        """How many ways the batch is split."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_ranks(self) -> int:
        """How many ranks share one copy of the model's state under ZeRO 1 to 3."""
        return self.dp_shard * self.cp

    @property
    def replica(self) -> Layout:
        """The layout of one replica alone."""
        return replace(self, dp_replicate=1)

    @property
    def stage(self) -> Layout:
        """The layout of the ranks with the same layers alone: of one place along `pp`."""
        return replace(self, pp=1)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split anything, outermost first."""
        return tuple(axis for axis in MESH_ORDER if getattr(self, axis) > 1)

    def place(self, rank: int) -> Place:
        """Where the rank with this number stands."""
        found = {}
        for axis in reversed(MESH_ORDER):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return Place(**found)


def name_in(layout: Layout, group: str) -> str:
    """What the mesh of this layout calls a group; empty where no rank shares it."""
    if group == "ep" and layout.ep == layout.ranks:
        group = EVERYONE  # all ranks together have one group only
    if group not in (SHARDS, REPLICAS, EXPERT_REPLICAS, STAGE, EVERYONE):
        return group
    degrees = {axis: getattr(layout, axis) for axis in MESH_ORDER}
    axes = group.split("*")
    if group == EXPERT_REPLICAS:
        degrees[EXPERT_SHARDS] = layout.shard_ranks // layout.ep
        axes = ["dp_replicate", EXPERT_SHARDS if layout.ep > 1 else "cp"]
    return "*".join(axis for axis in axes if degrees[axis] > 1)


def described(job: Job) -> str:
    """A resolved job's layout in words, with what its axes are set to: `pp2 (zbv) x cp4 (ring)`."""
    layout = Layout.of(job)
    settings = {"pp": job.layout.schedule, "cp": job.layout.cp_kind}
    words = []
    for axis in (*MESH_ORDER, "ep"):
        if (degree := getattr(layout, axis)) > 1:
            words.append(f"{axis}{degree} ({settings[axis]})" if axis in settings else f"{axis}{degree}")
    if layout.zero:
        words.append(f"zero{layout.zero}")
    return " x ".join(words) or "one process"
