"""Each device and each pair of devices of this machine, measured to be compared with the others."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from fivefold.bench.probe import agreement
from fivefold.bench.timing import seconds_of, window_of
from fivefold.comm.point_to_point import Exchange
from fivefold.comm.world import DeviceKind, World
from fivefold.training.ranks import run_ranks

SIDE = {"cpu": 512, "cuda": 8192}
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
BYTES = {"cpu": 2**20, "cuda": 2**26}
"""Of the product, [side, side] x [side, side], and of the message that goes both ways."""
ROUNDS = 5
SLOW_PRODUCT = {"cpu": 3.0, "cuda": 1.15}
SLOW_MESSAGE = {"cpu": 5.0, "cuda": 1.5}
"""So many times the median's time is an outlier; processes that share a CPU take turns."""


@dataclass(frozen=True)
class Compared:
    """Seconds of a product on each device, and of a message between each pair."""

    kind: DeviceKind
    products: Mapping[int, float]
    messages: Mapping[tuple[int, int], float]

    @property
    def flops(self) -> dict[int, float]:
        return {rank: 2.0 * SIDE[self.kind] ** 3 / seconds for rank, seconds in self.products.items()}

    @property
    def bandwidths(self) -> dict[tuple[int, int], float]:
        """Bytes a second, each way."""
        return {pair: BYTES[self.kind] / seconds for pair, seconds in self.messages.items()}

    def outliers(self) -> list[str]:
        """The devices and pairs that are slower than the median by far."""
        device = "GPU" if self.kind == "cuda" else "process"
        found = [
            f"{device} {rank}: a matrix product takes {times:.1f} times the median's time"
            for rank, times in slow(self.products, SLOW_PRODUCT[self.kind]).items()
        ]
        return found + [
            f"{device}s {one} and {two}: a message takes {times:.1f} times the median's time"
            for (one, two), times in slow(self.messages, SLOW_MESSAGE[self.kind]).items()
        ]


def slow(seconds: Mapping[Any, float], factor: float) -> dict[Any, float]:
    """What takes at least `factor` times the median, with how many times."""
    if len(seconds) < 2:
        return {}
    median = statistics.median_low(seconds.values())
    return {name: each / median for name, each in seconds.items() if each >= factor * median}


def compare(ranks: int, kind: DeviceKind) -> Compared:
    """Measure, with a rank on each GPU, or `ranks` processes on the CPU. Raises `RanksFailed`."""
    found = run_ranks(_measure, ranks, device=kind)
    messages = {pair: seconds for _, pairs in found for pair, seconds in pairs.items()}
    return Compared(kind, {rank: product for rank, (product, _) in enumerate(found)}, messages)


def _measure(world: World) -> tuple[float, dict[tuple[int, int], float]]:
    """Seconds of this rank's product, and of its messages with ranks above it."""
    kind, device = world.device.type, world.device
    agree = agreement(world)
    left, right = (torch.randn(SIDE[kind], SIDE[kind], device=device).to(DTYPE[kind]) for _ in range(2))
    products = []
    for _ in range(ROUNDS):
        agree(0.0)  # all at the same time, as in training
        products.append(window_of(lambda: torch.mm(left, right), device))
    messages = {}
    for pair in combinations(range(world.size), 2):
        agree(0.0)
        if world.rank in pair:
            seconds = _exchanged(world, pair[0] + pair[1] - world.rank)
            if world.rank == pair[0]:
                messages[pair] = seconds
    agree(0.0)
    return statistics.median(products), messages


def _exchanged(world: World, peer: int) -> float:
    """Seconds of a message to a peer while one comes from it."""
    group = dist.group.WORLD
    assert group is not None
    whole = torch.ones(BYTES[world.device.type] // 4, device=world.device)
    times = [
        seconds_of(lambda: Exchange(whole, group, peer, peer).wait(), world.device, 1)
        for _ in range(ROUNDS + 1)
    ]
    return statistics.median(times[1:])  # the first one connects
