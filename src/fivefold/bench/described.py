"""A probed machine in tables for people, and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fivefold.hardware.cluster import Cluster, Measured, Rates

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, header, rows."""


def as_json(cluster: Cluster) -> dict[str, Any]:
    """The cluster's fields by their names."""
    device = asdict(cluster.device) | {"words": sorted(cluster.device.words)}
    return {"ranks": cluster.server, "cluster": asdict(cluster) | {"device": device}}


def tables(cluster: Cluster) -> Iterator[Table]:
    """What was measured of a cluster; all rates are one rank's."""
    measured = cluster.measured
    if measured is None:
        return
    yield _compute(cluster, measured)
    if measured.collectives:
        yield _messages(measured)


def _compute(cluster: Cluster, measured: Measured) -> Table:
    title = (
        f"{cluster.device.name}, {cluster.server} rank(s)\n"
        f"memory {measured.memory_bandwidth / 1e9:.1f} GB/s, an operation {measured.launch * 1e6:.1f} us; "
        "each rank computes, in GFLOP/s:"
    )
    rows = [
        (
            dtype,
            _rate(rates[:1]),
            _rate(rates),
            _rate(measured.tall.get(dtype, ())),
            f"{measured.attention[dtype] / 1e9:,.1f}",
        )
        for dtype, rates in measured.matmul.items()
    ]
    return title, ("dtype", "smallest square", "best square", "best tall", "attention"), rows


def _rate(rates: Rates) -> str:
    return f"{max((rate for _, rate in rates), default=0.0) / 1e9:,.1f}"


def _messages(measured: Measured) -> Table:
    rows = [
        (operation, f"{ranks}", *(_shown(*times[index]) for index in (0, len(times) // 2, -1)))
        for operation, sizes in measured.collectives.items()
        for ranks, times in sizes.items()
    ]
    return "messages between ranks:", ("operation", "ranks", "smallest", "middle", "largest"), rows


def _shown(payload: float, seconds: float) -> str:
    size = f"{payload / 2**20:g} MiB" if payload >= 2**20 else f"{payload / 2**10:g} KiB"
    took = f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
    return f"{size} in {took}"
