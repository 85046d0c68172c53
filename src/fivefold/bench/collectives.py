"""How long each algorithm of a collective takes here, beside the backend's own.

Algorithm bandwidth is the tensor's bytes over the time. Bus bandwidth is what each rank would have to send
for it at the least, over the time: figures of different operations and numbers of ranks can be compared, and
none can be above what the link carries. (The convention of NCCL's own tests.)

Beside the times stands what the busiest rank sends, as the tracer sees it on its way to the process group.
What a backend's own algorithm sends, it sends from inside, and nobody sees.
"""

import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from fivefold.comm.tracer import Tracer
from fivefold.comm.world import DeviceKind, World, too_many
from fivefold.hardware.devices import GIBI
from fivefold.hardware.host_memory import available_memory
from fivefold.ledger.ledger import wire_bytes
from fivefold.problems import BadInput, Problem, did_you_mean
from fivefold.training.ranks import run_ranks

SIZES = tuple(KIB * GROWTH**step for step in range(8))  # 1 KiB to 16 MiB
COPIES = 3
"""Of a tensor on each rank, on average: its own, one on its way, the result."""
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
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
    sent                by payload, tensors that the busiest rank sends; nothing of a backend's own
    """

    case: Case
    ranks: int
    seconds: dict[int, float]
    latency: float
    bandwidth: float
    error: float
    sent: dict[int, float] = field(default_factory=dict)

    @property
    def fitted(self) -> bool:
        """Whether the line says anything: through one size there are many."""
        return len(self.seconds) > 1

    def algorithm_bandwidth(self, payload: int) -> float:
        return payload / self.seconds[payload]

    def bus_bandwidth(self, payload: int) -> float:
        return bus_factor(self.case.operation, self.ranks) * self.algorithm_bandwidth(payload)


def bus_factor(operation: str, ranks: int) -> float:
    """What each rank must send at the least, in tensors."""
    if operation in ("broadcast", "reduce"):
        return 1.0
    return float(wire_bytes(operation, 1.0, ranks))


def sizes_in(text: str) -> tuple[int, ...]:
    """Bytes, from words as 1KiB,64MB. Raises `BadInput`."""
    found = []
    for word in text.split(","):
        number = re.fullmatch(r"\s*(\d{1,15})\s*([a-zA-Z]*)\s*", word, flags=re.ASCII)
        if number is None or number[2].upper() not in UNITS or int(number[1]) == 0:
            hint = "Give bytes, with commas between them: 64KiB,64MB (B, KB, MB, GB, KiB, MiB, GiB)."
            raise BadInput([Problem("--sizes", f"'{word.strip()}' is no size", hint)])
        found.append(int(number[1]) * UNITS[number[2].upper()])
    return tuple(dict.fromkeys(found))


def check(
    ranks: int, device: DeviceKind, operation: str | None = None, sizes: Sequence[int] = SIZES
) -> list[Problem]:
    """Why this cannot be measured, found before any rank starts."""
    problems = _sizes_that_do_not_fit(max(1, ranks), device, sizes)
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
    return problems


def _sizes_that_do_not_fit(ranks: int, device: DeviceKind, sizes: Sequence[int]) -> list[Problem]:
    if min(sizes) < WORD * ranks:
        hint = f"Give {WORD * ranks} bytes or more: a number of {WORD} bytes for each rank."
        return [Problem("--sizes", f"{min(sizes)} bytes cannot be dealt to {ranks} ranks", hint)]
    most = available_memory() / (COPIES * ranks)
    if device == "cpu" and max(sizes) > most:
        text = f"{max(sizes) / GIBI:,.2f} GiB on each of {ranks} ranks, {COPIES} times, is more than is free"
        return [Problem("--sizes", text, f"Give {most / 2**20:,.0f} MiB or less, or fewer --ranks.")]
    return []


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


Found = tuple[dict[int, float], dict[int, float]]
"""By payload: seconds, and tensors that this rank sent."""


def _measure(world: World, operations: list[str], budget: float, sizes: tuple[int, ...]) -> dict[Case, Found]:
    """Each case, by this rank."""
    agree, ends = agreement(world), time.perf_counter() + budget
    group = dist.group.WORLD
    assert group is not None
    cases = list(_cases(operations, dist.get_backend(group)))
    found = {}
    for done, case in enumerate(cases):
        messages = [_Message(case, payload, world, group) for payload in sizes]
        left = agree(ends - time.perf_counter())
        seconds = in_turns(messages, world, agree, left / (len(cases) - done))
        timed = [message for message in messages if message.payload in seconds]
        found[case] = seconds, {message.payload: message.sent() for message in timed if message.is_ours}
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

    @property
    def is_ours(self) -> bool:
        return self.case.algorithm in ALGORITHMS

    @property
    def elements(self) -> int:
        """Of the whole tensor: as many for each rank."""
        return max(1, self.payload // (WORD * self.group.size())) * self.group.size()

    def sent(self) -> float:
        """Tensors that this rank sends for it, by the bytes that the tracer sees."""
        with Tracer() as tracer:
            self.prepared()()
        sends = [seen.payload for seen in tracer.seen if seen.operation == "send"]
        return float(sum(sends)) / (WORD * self.elements)

    def prepared(self) -> Call:
        operation, elements = self.case.operation, self.elements
        piece = elements // self.group.size() if operation == "all_gather" else elements
        x = torch.ones(piece, device=self.world.device)
        if self.is_ours:
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


def _timed(case: Case, ranks: int, by_rank: Sequence[Found]) -> Timed:
    seconds, sent = by_rank[0]
    seconds = {payload: statistics.median(each[payload] for each, _ in by_rank) for payload in seconds}
    busiest = {payload: max(each[payload] for _, each in by_rank) for payload in sent}
    latency, bandwidth = latency_and_bandwidth(tuple((float(size), took) for size, took in seconds.items()))
    errors = [abs(latency + size / bandwidth - took) / took for size, took in seconds.items()]
    return Timed(case, ranks, seconds, latency, bandwidth, statistics.median(errors), busiest)
