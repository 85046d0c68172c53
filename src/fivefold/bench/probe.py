"""`fivefold probe`: this machine measured into a cluster, in at most a minute.

All ranks start together and measure at the same time; of each figure the ranks' median is taken.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from fivefold.bench.compute import Agree, Computed, measure_compute
from fivefold.bench.fit import fitted_level, rising
from fivefold.bench.messages import Seconds, measure_messages, median_over_ranks
from fivefold.bench.sharded import measure_sharded
from fivefold.comm.world import DeviceKind, World, device_kind, too_many
from fivefold.hardware.cluster import Cluster, Level, Measured, Rates
from fivefold.hardware.devices import GIBI, Device, find_device, this_cpu
from fivefold.problems import Problem, unwritable
from fivefold.training.ranks import run_ranks

NAME = "this-machine"
LASTS = 36.0
"""Seconds from the start of the ranks to the end; what was begun then is still finished."""
COMPUTE_SHARE = 0.4


@dataclass(frozen=True)
class _Found:
    """What one rank measured."""

    device_name: str
    memory_gib: float
    computed: Computed
    messages: Seconds
    sharded: float


@dataclass(frozen=True)
class Probed:
    """A machine as it was measured, and how many seconds that took, the start of the ranks included."""

    cluster: Cluster
    seconds: float


def check(nproc: int | None, out: str | None) -> list[Problem]:
    """Why this machine cannot be measured so, found before a minute is spent."""
    problems = []
    gpus = torch.cuda.device_count()
    if nproc is not None and nproc < 1:
        problems.append(Problem("--nproc", f"{nproc} ranks cannot measure anything", "Give 1 or more."))
    if nproc is not None and device_kind() == "cuda" and nproc > gpus:
        hint = f"Give {gpus} or fewer: each rank measures a GPU of its own."
        problems.append(Problem("--nproc", f"{nproc} ranks, but this machine has {gpus} GPU(s)", hint))
    if nproc is not None and device_kind() == "cpu":
        problems += too_many(nproc, "--nproc")
    return problems + unwritable(out, "--out")


def probe(nproc: int | None = None, lasts: float = LASTS) -> Probed:
    """Measure this machine, one rank on each GPU or `nproc` of them sharing the CPU, in `lasts` seconds."""
    start = time.perf_counter()
    kind = device_kind()
    ranks = nproc or (torch.cuda.device_count() if kind == "cuda" else 1)
    found = run_ranks(_measure, ranks, time.time() + lasts, device=kind)
    return Probed(_cluster(found, kind), time.perf_counter() - start)


def _measure(world: World, ends: float) -> _Found:
    on_gpu = world.device.type == "cuda"
    agree = agreement(world)
    share = COMPUTE_SHARE if world.size > 1 else 1.0
    computed = measure_compute(world.device, agree, share * agree(_left(ends)))
    messages = measure_messages(world, agree, agree(_left(ends))) if world.size > 1 else {}
    sharded = measure_sharded(world, agree, messages) if messages and not on_gpu else 0.0
    return _Found(
        torch.cuda.get_device_name(world.device) if on_gpu else "",
        torch.cuda.get_device_properties(world.device).total_memory / GIBI if on_gpu else 0.0,
        computed,
        messages,
        sharded,
    )


def _left(ends: float) -> float:
    """Seconds until then, but enough to measure anything at all."""
    return max(3.0, ends - time.time())


def agreement(world: World) -> Agree:
    """How the ranks of a world agree on a number: the largest."""

    def largest(value: float) -> float:
        if world.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=world.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return float(shared)

    return largest


def _cluster(found: Sequence[_Found], kind: DeviceKind) -> Cluster:
    messages = {
        operation: {ranks: rising(times) for ranks, times in sizes.items()}
        for operation, sizes in median_over_ranks([one.messages for one in found]).items()
    }
    computed = [one.computed for one in found]
    measured = Measured(
        matmul=_median_rates([one.matmul for one in computed]),
        tall=_median_rates([one.tall for one in computed]),
        attention=_median_figures([one.attention for one in computed]),
        memory_bandwidth=statistics.median(one.memory_bandwidth for one in computed),
        launch=statistics.median(one.launch for one in computed),
        collectives=messages,
        sharded=statistics.median(one.sharded for one in found),
    )
    level = (
        fitted_level("machine", len(found), messages["all_gather"][len(found)])
        if messages
        else Level("machine", 1, measured.memory_bandwidth, measured.launch)
    )
    return Cluster(NAME, _described(found, kind, measured), (level,), measured=measured)


def _described(found: Sequence[_Found], kind: DeviceKind, measured: Measured) -> Device:
    """The device of the table, or one whose peaks are the best that were measured."""
    known = find_device(found[0].device_name) if kind == "cuda" else None
    if known is not None:
        return known
    if kind == "cpu":
        bare = this_cpu(len(found))
    else:
        words = frozenset(found[0].device_name.lower().split())
        bare = Device(found[0].device_name, {}, found[0].memory_gib, 0.0, words, "")
    best = {dtype: max(rate for _, rate in rates) for dtype, rates in measured.matmul.items()}
    return replace(
        bare,
        peak_flops=best,
        memory_bandwidth=measured.memory_bandwidth,
        source="measured by fivefold probe: its peaks are the fastest matrix products seen",
    )


def _median_rates(by_rank: Sequence[Mapping[str, Rates]]) -> dict[str, Rates]:
    """Of each dtype and size, the ranks' median rate."""
    return {
        dtype: tuple(
            (flops, statistics.median(rates[dtype][index][1] for rates in by_rank))
            for index, (flops, _) in enumerate(sizes)
        )
        for dtype, sizes in by_rank[0].items()
    }


def _median_figures(by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {dtype: statistics.median(figures[dtype] for figures in by_rank) for dtype in by_rank[0]}
