"""How long each algorithm of a collective takes here, beside the backend's own.

Algorithm bandwidth is the tensor's bytes over the time. Bus bandwidth is what each rank would have to send
for it at the least, over the time: figures of different operations and numbers of ranks can be compared, and
none can be above what the link carries. (The convention of NCCL's own tests.)
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fivefold.bench.fit import latency_and_bandwidth
from fivefold.bench.messages import GROWTH, KIB, WORD, in_turns
from fivefold.bench.probe import agreement
from fivefold.bench.timing import Call
from fivefold.comm import collectives, send_receive
from fivefold.comm.algorithms import ALGORITHMS
from fivefold.comm.world import DeviceKind, World, too_many
from fivefold.ledger.ledger import wire_bytes
from fivefold.problems import Problem, did_you_mean, unwritable
from fivefold.training.ranks import run_ranks

SIZES = tuple(KIB * GROWTH**step for step in range(8))  # 1 KiB to 16 MiB
OPERATIONS = tuple(dict.fromkeys(algorithm.operation for algorithm in ALGORITHMS.values()))


@dataclass(frozen=True)
class Case:
    """An operation by one algorithm, or by the backend's own (`algorithm` is then the backend's name)."""

    operation: str
    algorithm: str


@dataclass(frozen=True)
class Timed:
    """One case, timed: seconds by payload, the bytes of the whole tensor, and a line fitted through them.

    latency, bandwidth  seconds = latency + payload / bandwidth
    error               how far the line is off, the median of its relative errors
    """

    case: Case
    ranks: int
    seconds: dict[int, float]
    latency: float
    bandwidth: float
    error: float

    def algorithm_bandwidth(self, payload: int) -> float:
        return payload / self.seconds[payload]

    def bus_bandwidth(self, payload: int) -> float:
        return bus_factor(self.case.operation, self.ranks) * self.algorithm_bandwidth(payload)


def bus_factor(operation: str, ranks: int) -> float:
    """What each rank must send at the least, in tensors."""
    if operation in ("broadcast", "reduce"):
        return 1.0
    return float(wire_bytes(operation, 1.0, ranks))


def check(ranks: int, device: DeviceKind, operation: str | None, png: str | None) -> list[Problem]:
    """Why this cannot be measured, found before any rank starts."""
    problems = []
    if ranks < 2:
        problems.append(Problem("--ranks", f"{ranks} has nobody to send to", "Give 2 or more."))
    if device == "cuda" and ranks > (gpus := torch.cuda.device_count()):
        hint = f"Give {gpus} or fewer, or --device cpu." if gpus > 1 else "Give --device cpu."
        problems.append(Problem("--ranks", f"{ranks} ranks, but this machine has {gpus} GPU(s)", hint))
    if device == "cpu":
        problems += too_many(ranks, "--ranks")
    if operation is not None and operation not in OPERATIONS:
        hint = did_you_mean(operation, OPERATIONS)
        problems.append(Problem("--operation", f"'{operation}' is unknown", hint))
    return problems + unwritable(png, "--png")


def measure(
    ranks: int,
    device: DeviceKind,
    operation: str | None = None,
    seconds: float = 30.0,
    sizes: Sequence[int] = SIZES,
) -> list[Timed]:
    """Every algorithm of one operation, or of all, in about that many seconds."""
    wanted = [name for name in OPERATIONS if operation in (None, name)]
    by_rank = run_ranks(_measure, ranks, wanted, seconds, tuple(sizes), device=device)
    return [_timed(case, ranks, [found[case] for found in by_rank]) for case in by_rank[0]]


def _measure(
    world: World, operations: list[str], budget: float, sizes: tuple[int, ...]
) -> dict[Case, dict[int, float]]:
    """Seconds of each case and payload, by this rank."""
    agree, ends = agreement(world), time.perf_counter() + budget
    group = dist.group.WORLD
    assert group is not None
    cases = list(_cases(operations, dist.get_backend(group)))
    found = {}
    for done, case in enumerate(cases):
        messages = [_Message(case, payload, world, group) for payload in sizes]
        left = agree(ends - time.perf_counter())
        found[case] = in_turns(messages, world, agree, left / (len(cases) - done))
    return found


def _cases(operations: Sequence[str], backend: str) -> Iterator[Case]:
    for operation in operations:
        yield Case(operation, backend)
        for algorithm in ALGORITHMS.values():
            if algorithm.operation == operation:
                yield Case(operation, algorithm.name)


@dataclass(frozen=True)
class _Message:
    """One case and size, ready to be sent again and again."""

    case: Case
    payload: int
    world: World
    group: dist.ProcessGroup

    def prepared(self) -> Call:
        ranks, operation = self.group.size(), self.case.operation
        elements = max(1, self.payload // (WORD * ranks)) * ranks
        x = torch.ones(elements // ranks if operation == "all_gather" else elements, device=self.world.device)
        if self.case.algorithm in ALGORITHMS:
            return partial(_OURS[operation], x, self.group, self.case.algorithm)
        return partial(_THEIRS[operation], x, self.group)


_OURS: dict[str, Callable[..., Any]] = {
    "all_reduce": send_receive.all_reduce,
    "broadcast": lambda x, group, _: send_receive.broadcast(x, group),
    "reduce": lambda x, group, _: send_receive.reduce(x, group),
    "all_gather": lambda x, group, _: send_receive.all_gather(x, group),
    "reduce_scatter": lambda x, group, _: send_receive.reduce_scatter(x, group),
    "all_to_all": lambda x, group, _: send_receive.all_to_all(x, group),
}


def _dealt(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    each = [x.numel() // group.size()] * group.size()
    return collectives.exchanged(x, group, each, each)


_THEIRS: dict[str, Callable[..., Any]] = {
    "all_reduce": collectives.summed,
    "broadcast": lambda x, group: dist.broadcast(x, group=group, group_src=0),
    "reduce": lambda x, group: dist.reduce(x, group=group, group_dst=0),
    "all_gather": collectives.gathered,
    "reduce_scatter": collectives.scattered,
    "all_to_all": _dealt,
}


def _timed(case: Case, ranks: int, by_rank: Sequence[dict[int, float]]) -> Timed:
    seconds = {payload: statistics.median(each[payload] for each in by_rank) for payload in by_rank[0]}
    latency, bandwidth = latency_and_bandwidth(tuple((float(size), took) for size, took in seconds.items()))
    errors = [abs(latency + size / bandwidth - took) / took for size, took in seconds.items()]
    return Timed(case, ranks, seconds, latency, bandwidth, statistics.median(errors))
