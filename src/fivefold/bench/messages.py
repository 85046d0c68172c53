"""How long messages take between the ranks of this machine, sent as training sends them.

Sizes take turns, round after round, and a message's time is the median over the rounds: whatever else slows
the machine for a second slows one round of all sizes, not one size. Groups of a size that are cut from the
same ranks send at the same time, as the groups of a layout do.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.bench.compute import Agree
from fivefold.bench.timing import Call, seconds_of
from fivefold.comm.collectives import exchanged, gathered, scattered, summed
from fivefold.comm.point_to_point import Exchange
from fivefold.comm.world import World
from fivefold.hardware.cluster import OPERATIONS, Times

KIB = 1024
GROWTH = 4
SIZES = {
    "cpu": tuple(KIB * GROWTH**step for step in range(9)),  # 1 KiB to 64 MiB
    "cuda": tuple(16 * KIB * GROWTH**step for step in range(9)),  # 16 KiB to 1 GiB
}
LEAST_SIZES = 6
"""However slow the machine is, a table of fewer would say little."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 60
TURN = 0.01
"""Seconds of a message's turn in a round, unless it takes longer itself."""
MOST_IN_A_ROW = 20
LONGEST = 0.1
"""Seconds that a message is expected to take from which on it is not tried."""
WORD = 4
"""Bytes of a float32."""

Seconds = dict[str, dict[int, dict[int, float]]]
"""operation -> ranks -> payload -> seconds"""


def group_sizes(ranks: int) -> list[int]:
    """The group sizes that are measured: powers of two that divide the ranks, and all of them."""
    powers = [2**power for power in range(1, ranks.bit_length()) if ranks % 2**power == 0]
    return sorted({*powers, ranks})


def measure_messages(
    world: World, agree: Agree, budget: float, sizes: Sequence[int] | None = None
) -> Seconds:
    """Seconds of every operation, for groups of several sizes, in about `budget` seconds; by this rank."""
    ends = time.perf_counter() + budget
    payloads = sizes or SIZES[world.device.type]
    groups = {ranks: _group_of(world, ranks) for ranks in group_sizes(world.size)}
    cases = [(operation, ranks) for operation in OPERATIONS for ranks in groups]
    found: Seconds = {operation: {} for operation in OPERATIONS}
    for done, (operation, ranks) in enumerate(cases):
        messages = [_Message(operation, payload, groups[ranks], world.device) for payload in payloads]
        left = agree(ends - time.perf_counter())
        found[operation][ranks] = in_turns(messages, world, agree, left / (len(cases) - done))
    return found


def median_over_ranks(by_rank: Sequence[Seconds]) -> dict[str, dict[int, Times]]:
    """One table for all ranks, as `hardware.Measured` has it: of each message the ranks' median."""
    return {
        operation: {
            ranks: tuple(
                (float(payload), statistics.median(one[operation][ranks][payload] for one in by_rank))
                for payload in sorted(payloads)
            )
            for ranks, payloads in sizes.items()
        }
        for operation, sizes in by_rank[0].items()
    }


def _group_of(world: World, ranks: int) -> dist.ProcessGroup:
    """This rank's group when neighbours are put together `ranks` at a time."""
    mine: dist.ProcessGroup | None = None
    for first in range(0, world.size, ranks):
        group = dist.new_group(list(range(first, first + ranks)))
        if first <= world.rank < first + ranks:
            mine = group
    assert mine is not None
    return mine


class Repeated(Protocol):
    """A message of `payload` bytes that can be sent again and again."""

    @property
    def payload(self) -> int: ...

    def prepared(self) -> Call:
        """The call that sends it, its tensor made beforehand."""
        ...


@dataclass(frozen=True)
class _Message:
    """A message as training sends it."""

    operation: str
    payload: int
    group: dist.ProcessGroup
    device: torch.device

    def prepared(self) -> Callable[[], Tensor]:
        """The call that sends it, its tensor made beforehand."""
        ranks, group = self.group.size(), self.group
        elements = max(1, self.payload // (WORD * ranks)) * ranks
        if self.operation == "all_gather":
            piece = torch.ones(elements // ranks, device=self.device)
            return lambda: gathered(piece, group)
        whole = torch.ones(elements, device=self.device)
        if self.operation == "all_reduce":
            return lambda: summed(whole, group)
        if self.operation == "reduce_scatter":
            return lambda: scattered(whole, group)
        if self.operation == "all_to_all":
            parts = [elements // ranks] * ranks
            return lambda: exchanged(whole, group, parts, parts)
        here = group.rank()
        return lambda: Exchange(whole, group, (here + 1) % ranks, (here - 1) % ranks).wait()


def in_turns(messages: Sequence[Repeated], world: World, agree: Agree, budget: float) -> dict[int, float]:
    """The median seconds of each payload over rounds in which all take their turn."""
    start = time.perf_counter()
    expected = _tried(messages, world, agree)
    rounds: dict[int, list[float]] = {message.payload: [] for message in expected}
    for number in range(MOST_ROUNDS):
        if agree(time.perf_counter() - start) > budget and number >= LEAST_ROUNDS:
            break
        for message, once in expected.items():
            call = message.prepared()
            call()  # ranks come together here, so that the next calls are not about who came first
            calls = min(MOST_IN_A_ROW, max(1, round(TURN / once)))
            rounds[message.payload].append(seconds_of(call, world.device, calls))
    return {payload: statistics.median(seconds) for payload, seconds in rounds.items()}


def _tried(messages: Sequence[Repeated], world: World, agree: Agree) -> dict[Repeated, float]:
    """About how long each message takes, as all ranks agree; up to the first after which it gets too long."""
    found: dict[Repeated, float] = {}
    for message in messages:
        call = message.prepared()
        call()
        found[message] = agree(min(seconds_of(call, world.device, 1) for _ in range(2)))
        if found[message] > LONGEST / GROWTH and len(found) >= LEAST_SIZES:
            break
    return found
