"""How long a message takes: latency and bandwidth of a collective over the levels of a cluster.

A group of ranks is given by how many there are and how far apart neighbours are in rank numbers; ranks fill
servers, racks and pods in order. From that follows how many of the group share a unit of each level, and so

- how many steps of a ring stay inside a server and how many leave it,
- through how many network adapters the group leaves it: as many as it has ranks there,
- at which level that is slowest. The switches of a level that is oversubscribed carry less.

A message takes the fastest of the algorithms that its operation has (ring; tree; switches that add up; a
protocol with short steps at low bandwidth). Where a cluster was probed, what was measured goes first.
Every number may be an array over many layouts. docs/hardware.md says how wrong this is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.axes.layout import EXPERT_SHARDS, MESH_ORDER
from fivefold.hardware.cluster import Cluster, Times
from fivefold.ledger.ledger import wire_bytes
from fivefold.ledger.setup import Figure, Number, Setup

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Transport:
    """What a communication library makes of the links."""

    base: float = 8.4e-6  # seconds before the first byte moves
    near: float = 0.8  # what a ring reaches of the bandwidth inside the innermost level
    far: float = 0.92  # what it reaches of it outside
    in_switch: float = 0.67  # what an all-reduce by adding switches reaches of the bandwidth
    tree: float = 0.92  # what a tree reaches of a ring's bandwidth
    crowding: float = 0.1  # between n units a network gives n ** -crowding of its bandwidth
    peer: float = 1e-6  # seconds for each further rank of an all-to-all
    # The protocol for small messages: its share of a hop's time, and of the bandwidth.
    short_hop: float = 0.18
    short_bandwidth: float = 0.1


NCCL = Transport()
"""Base and tree are of NCCL's tuning table, the bandwidths by runs of its tests: see docs/hardware.md."""


def message_time(
    cluster: Cluster,
    operation: str,
    payload: Figure,
    ranks: Number,
    stride: Number,
    transport: Transport = NCCL,
) -> Figure:
    """Seconds that one message takes when nothing else is on the links of its ranks.

    payload  bytes of the whole tensor, as in a ledger's `Message`
    ranks    how many are in the group
    stride   the distance in rank numbers between neighbours of the group (see `strides`)
    """
    operation = "send" if operation == "recv" else operation
    route = _Route(cluster, transport, operation, 1.0 * payload, ranks, stride)
    seconds = _ALGORITHMS[operation](route)
    measured = cluster.measured.collectives.get(operation) if cluster.measured is not None else None
    if measured:  # of groups that stay among the ranks that were probed together
        near = (route.units[1] == 1) & (route.ranks <= max(measured))
        seconds = np.where(near, _looked_up(measured, route), seconds)
    seconds = np.where((route.ranks > 1) & (route.payload > 0), seconds, 0.0)
    return seconds if seconds.ndim else float(seconds)


def strides(setup: Setup) -> dict[str, Number]:
    """The distance in rank numbers between neighbours of every group of the mesh, by the ledger's names.

    Axes that act as one are joined by `*`, outermost first: the innermost of them says how near the next is.
    """
    inner: dict[str, Number] = {}
    distance: Number = 1
    for axis in reversed(MESH_ORDER):
        inner[axis] = distance
        distance = distance * getattr(setup, axis)
    groups = {
        "*".join(axes): inner[axes[-1]]
        for count in range(1, len(MESH_ORDER) + 1)
        for axes in combinations(MESH_ORDER, count)
    }
    experts = setup.tp * setup.ep
    return groups | {"ep": setup.tp, EXPERT_SHARDS: experts, f"dp_replicate*{EXPERT_SHARDS}": experts}


class _Route:
    """Where the ranks of a group sit, and what the way between them allows."""

    def __init__(self, cluster: Cluster, transport: Transport, operation: str, *numbers: Figure):
        self.cluster, self.transport, self.operation = cluster, transport, operation
        self.payload, self.ranks, stride = np.broadcast_arrays(*numbers)
        # Units of each level that the group is spread over, the devices themselves first.
        self.units = [self.ranks]
        for level in cluster.levels:
            together = np.clip(level.devices // stride, 1, self.ranks)
            self.units.append(-(-self.ranks // together))
        self.units[-1] = np.ones_like(self.ranks)  # more ranks than there are devices: as if there were more
        # Ranks of one group inside a unit of the level below: each has its own adapter to go out by.
        self.ways = [self.ranks / units for units in self.units[:-1]]
        self.crossed = [below > above for below, above in pairwise(self.units)]
        # Bytes/s that one device gets through each level when all of them send.
        inner, *outer = cluster.levels
        self.links = [np.asarray(inner.bandwidth * transport.near)]
        for level, units in zip(outer, self.units[1:-1], strict=True):
            crowded = np.asarray(units, float) ** -transport.crowding
            self.links.append(level.bandwidth * transport.far * crowded / level.oversubscription)

    def moving(self, part: float = 1.0) -> Array:
        """Seconds of the bytes in a ring, at some part of its bandwidth: the narrowest crossing decides."""
        levels = zip(self.crossed, self.links, self.ways, strict=True)
        rates = [np.where(crossed, link * ways, np.inf) for crossed, link, ways in levels]
        sent = wire_bytes(self.operation, self.payload, self.ranks)
        return np.asarray(sent / (np.minimum.reduce(rates) * part))

    def latency(self, hops: Callable[[Array, Array], Array]) -> Array:
        """Seconds of all hops, twice for a sum that all ranks get.

        hops  how many there are at a level, by the units below it and its own
        """
        levels = zip(pairwise(self.units), self.cluster.levels, strict=True)
        total = sum(hops(below, above) * level.latency for (below, above), level in levels)
        passes = 2 if self.operation == "all_reduce" else 1
        return np.asarray(passes * total)

    def farthest(self, figures: Sequence[Any]) -> Array:
        """The figure of the outermost level that the group crosses."""
        return np.select(self.crossed[::-1], figures[::-1], np.inf)

    def farthest_hop(self) -> Array:
        """Seconds until the first byte has crossed that level."""
        return self.transport.base + self.farthest([level.latency for level in self.cluster.levels])

    def ring(self) -> Array:
        """A ring, or the same ring by the protocol for small messages."""
        transport, moving, latency = self.transport, self.moving(), self.latency(np.subtract)
        short = latency * transport.short_hop + moving / transport.short_bandwidth
        return np.asarray(transport.base + np.minimum(latency + moving, short))

    def all_reduce(self) -> Array:
        """A ring, a tree from its leaves to the root and back, or switches that add up."""
        level, transport = self.cluster.levels[0], self.transport
        hops = self.latency(lambda below, above: np.log2(below / above))
        fastest = np.minimum(self.ring(), transport.base + hops + self.moving(transport.tree))
        if not level.reduces:
            return fastest
        # The innermost level's switches: every device sends its tensor once and gets the sum once.
        moving = self.payload * (1 + 1 / self.ranks) / (level.bandwidth * transport.in_switch)
        in_switch = transport.base + 2 * level.latency + moving
        return np.where(self.units[1] == 1, np.minimum(fastest, in_switch), fastest)

    def all_to_all(self) -> Array:
        """Each rank sends a part to each other: what leaves a unit goes through its own rank's adapter."""
        through = [
            np.where(crossed, self.payload * (self.ranks - ways) / self.ranks / link, 0.0)
            for crossed, link, ways in zip(self.crossed, self.links, self.ways, strict=True)
        ]
        peers = self.transport.peer * (self.ranks - 1)
        return np.asarray(self.farthest_hop() + peers + np.maximum.reduce(through))

    def send(self) -> Array:
        """To the next rank of the group, across the outermost level between any two of them."""
        return np.asarray(self.farthest_hop() + self.payload / self.farthest(self.links))


_ALGORITHMS = {
    "all_reduce": _Route.all_reduce,
    "all_gather": _Route.ring,
    "reduce_scatter": _Route.ring,
    "all_to_all": _Route.all_to_all,
    "send": _Route.send,
}


def _looked_up(measured: Mapping[int, Times], route: _Route) -> Array:
    """Seconds out of a probe's tables; between sizes, and between rank counts, by lines of logarithms."""
    counts = sorted(measured)
    curves = np.stack([interpolated(measured[count], route.payload) for count in counts])
    place = np.interp(np.log(route.ranks), np.log(counts), np.arange(len(counts)))
    below, above = np.floor(place).astype(int), np.ceil(place).astype(int)
    less, more = (np.take_along_axis(curves, index[None], axis=0)[0] for index in (below, above))
    return np.asarray(np.exp(less + (place - below) * (more - less)))


def interpolated(times: Times, payload: Array) -> Array:
    """The logarithm of a message's seconds by a table of (payload, seconds).

    Below the table its first time, above it the bandwidth of its last line.
    """
    sizes, seconds = np.log(np.asarray(times).T)
    size = np.log(np.maximum(payload, 1.0))
    return np.asarray(np.interp(size, sizes, seconds) + np.maximum(size - sizes[-1], 0.0))
