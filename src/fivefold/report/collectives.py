"""Collectives as they were timed: a table, a picture, JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

from fivefold.bench.collectives import Timed
from fivefold.report.figures import pyplot, save

KIB, MIB = 2**10, 2**20
MEGA = 10**6
HEADER = ("operation", "algorithm", "bytes", "time", "algorithm GB/s", "bus GB/s", "busiest rank sends")


def rows(timed: Iterable[Timed]) -> list[tuple[str, ...]]:
    """One for each algorithm and size."""
    return [
        (
            each.case.operation,
            each.case.algorithm,
            size_in_words(payload),
            time_in_words(seconds),
            f"{each.algorithm_bandwidth(payload) / 1e9:.3g}",
            f"{each.bus_bandwidth(payload) / 1e9:.3g}",
            f"{each.sent[payload]:.3g} x" if payload in each.sent else "",
        )
        for each in timed
        for payload, seconds in each.seconds.items()
    ]


FIT_HEADER = ("operation", "algorithm", "latency", "GB/s", "off by")


def fits(timed: Iterable[Timed]) -> list[tuple[str, ...]]:
    """time = latency + bytes / bandwidth, and how far that is off (the median of its relative errors)."""
    return [
        (
            each.case.operation,
            each.case.algorithm,
            time_in_words(each.latency),
            f"{each.bandwidth / 1e9:.3g}",
            f"{each.error:.0%}",
        )
        for each in timed
        if each.fitted
    ]


def size_in_words(payload: int) -> str:
    if payload % MEGA == 0:
        return f"{payload // MEGA} MB"
    return f"{payload / MIB:g} MiB" if payload >= MIB else f"{payload / KIB:g} KiB"


def time_in_words(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def as_json(timed: Sequence[Timed], backend: str) -> dict[str, Any]:
    return {
        "backend": backend,
        "ranks": timed[0].ranks,
        "collectives": [
            {
                "operation": each.case.operation,
                "algorithm": each.case.algorithm,
                "sizes": [
                    {
                        "bytes": payload,
                        "seconds": seconds,
                        "algorithm_bandwidth": each.algorithm_bandwidth(payload),
                        "bus_bandwidth": each.bus_bandwidth(payload),
                        "busiest_rank_sends": each.sent.get(payload),
                    }
                    for payload, seconds in each.seconds.items()
                ],
                "fit": {"latency": each.latency, "bandwidth": each.bandwidth, "error": each.error}
                if each.fitted
                else None,
            }
            for each in timed
        ],
    }


def picture(timed: Sequence[Timed], title: str, path: str) -> None:
    """Time over size, a picture for each operation, a line for each algorithm. Raises `BadInput`."""
    plt = pyplot()
    operations = list(dict.fromkeys(each.case.operation for each in timed))
    columns = min(3, len(operations))
    deep = -(-len(operations) // columns)
    figure, axes = plt.subplots(
        deep, columns, figsize=(4.2 * columns, 3.4 * deep + 0.4), squeeze=False, layout="constrained"
    )
    for place in axes.flat[len(operations) :]:
        place.axis("off")
    for place, operation in zip(axes.flat, operations, strict=False):
        for each in (each for each in timed if each.case.operation == operation):
            sizes, seconds = zip(*each.seconds.items(), strict=True)
            place.plot(sizes, seconds, marker="o", markersize=3, linewidth=1.4, label=each.case.algorithm)
        place.set(xscale="log", yscale="log", title=operation, xlabel="bytes", ylabel="seconds")
        place.grid(alpha=0.25)
        place.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    save(figure, path)
