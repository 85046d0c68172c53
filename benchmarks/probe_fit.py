"""How well the probe's tables tell the time of a message size that is not in them.

    python benchmarks/probe_fit.py [RANKS ...] [--seconds S]

For each number of ranks (2 and 4 by default), messages of the probe's sizes and of sizes half-way between
them take turns in the same rounds. The tables are made of the probe's sizes alone, as `fivefold probe` makes
them; the others are predicted as the planner does, and compared with what they took. Beside that: one latency
and one bandwidth fitted to the same tables.
"""

from __future__ import annotations

import argparse
import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fivefold.bench.fit import latency_and_bandwidth, rising
from fivefold.bench.messages import SIZES, Seconds, measure_messages, median_over_ranks
from fivefold.bench.probe import agreement
from fivefold.comm.world import World, device_kind
from fivefold.hardware.cluster import Times
from fivefold.planner.time.collectives import interpolated
from fivefold.training.ranks import run_ranks

Errors = npt.NDArray[np.float64]


def half_way(sizes: tuple[int, ...]) -> list[int]:
    """Between each two sizes, their geometric mean."""
    return [math.isqrt(one * two) for one, two in pairwise(sizes)]


def measure(world: World, seconds: float, sizes: list[int]) -> Seconds:
    return measure_messages(world, agreement(world), seconds, sizes)


def parted(times: Times, known: set[int]) -> tuple[Times, Times]:
    """The entries of the probe's sizes, and those between the first and the last of them."""
    table = tuple(entry for entry in times if entry[0] in known)
    return table, tuple(entry for entry in times if entry[0] not in known and entry[0] < table[-1][0])


def errors(ranks: int, seconds: float) -> dict[tuple[int, str], Errors]:
    """(group size, operation) -> errors of the sizes that no table has: by the table, by one line."""
    known = SIZES[device_kind()]
    sizes = sorted({*known, *half_way(known)})
    by_rank = run_ranks(measure, ranks, seconds, sizes, device=device_kind())
    found = {}
    for operation, groups in median_over_ranks(by_rank).items():
        for group, times in groups.items():
            table, unseen = parted(times, set(known))
            payloads, took = np.asarray(unseen).T
            latency, bandwidth = latency_and_bandwidth(table)
            by_table = np.exp(interpolated(rising(table), payloads)) / took - 1
            by_line = (latency + payloads / bandwidth) / took - 1
            found[group, operation] = np.abs(np.stack([by_table, by_line]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    print("median over sizes of the error in time\n")
    print(f"{'ranks':>5} {'group':>5}  {'operation':<15}{'by table':>10}{'by one line':>13}")
    for ranks in given.ranks:
        rows = errors(ranks, given.seconds)
        rows[ranks, "all of these"] = np.concatenate(list(rows.values()), axis=1)
        for (group, operation), error in rows.items():
            by_table, by_line = np.median(error, axis=1)
            print(f"{ranks:>5} {group:>5}  {operation:<15}{by_table:>10.1%}{by_line:>13.1%}", flush=True)


if __name__ == "__main__":
    main()
