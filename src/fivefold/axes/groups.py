"""The groups of ranks that messages travel in, by names that hold for every layout.

A mesh leaves out axes of one rank: what is `dp_shard*cp` among many layouts is `cp` where dp_shard is 1.
Messages of many layouts at once bear the full names; `spelled` gives them the names of one layout's mesh.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fivefold.axes.layout import EXPERT_SHARDS, MESH_ORDER, Layout
from fivefold.ledger.ledger import Message

SHARDS = "dp_shard*cp"
"""Over which ZeRO 1 to 3 shard."""
REPLICAS = "dp_replicate*cp"
"""Whose ranks hold equal weights under zero 0."""
EXPERT_REPLICAS = f"dp_replicate*{EXPERT_SHARDS}"
"""Whose ranks hold the same experts under zero 0."""
EVERYONE = "*".join(MESH_ORDER)


def name_in(layout: Layout, group: str) -> str:
    """What the mesh of this layout calls a group; empty where no rank shares it."""
    if group == "ep" and layout.ep == layout.ranks:
        group = EVERYONE  # all ranks together have one group only
    if group not in (SHARDS, REPLICAS, EXPERT_REPLICAS, EVERYONE):
        return group
    degrees = {axis: getattr(layout, axis) for axis in MESH_ORDER}
    axes = group.split("*")
    if group == EXPERT_REPLICAS:
        degrees[EXPERT_SHARDS] = layout.shard_ranks // layout.ep
        axes = ["dp_replicate", EXPERT_SHARDS if layout.ep > 1 else "cp"]
    return "*".join(axis for axis in axes if degrees[axis] > 1)


def spelled(messages: Iterable[Message], layout: Layout) -> Iterator[Message]:
    """The messages, their groups named as in the mesh of this layout."""
    return (replace(message, group=name_in(layout, message.group)) for message in messages)
