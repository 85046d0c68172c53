"""Memory of the fullest rank: its tensors, and what the allocator and the driver add.

A pipeline's ranks differ: a few of them are computed (`rank_memory.LOOKED_AT`), and the fullest decides.
Every number may be an array over many layouts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from statistics import NormalDist
from typing import Any

import numpy as np

from fivefold.hardware.cluster import Cluster
from fivefold.hardware.devices import Device, DeviceKind
from fivefold.ledger.numbers import choose
from fivefold.ledger.setup import Figure, Setup
from fivefold.planner.memory.our_tensors import ours
from fivefold.planner.memory.rank_memory import RankMemory

GIB = 2**30
CONTEXT = 0.5 * GIB
"""A CUDA context and the kernels it loads: an assumption."""
COMMUNICATOR = 0.4 * GIB
"""Buffers of one NCCL communicator: an assumption, a bit below the 0.5 to 0.7 GB that NVIDIA/nccl issue 964
has for a group on 4 A100s. (Issue 864 has 1.6 GB for one.)"""
OUR_SPREAD = 0.05
"""As `MemoryConstants.spread`, of our own program: live ranks are within 3% of what is played, or 6% where
backward goes in halves; what their allocators reserve beside that is not known as well."""
UNUSABLE = 0.011
"""Part of a GPU's memory that is not to be had: an H100 of 80 GiB offers about 79.1. Assumed of all."""


@dataclass(frozen=True)
class MemoryConstants:
    """What is fitted, or taken as typical.

    activations  factor on activations and what comes and goes with them
    base         GiB that a rank's allocator holds beside what is described: workspaces, flat buffers
    gathered     share of the gathered inputs of tensor-parallel layers that are kept for backward
    slack        what the allocator reserves beyond what is allocated, as a part of it
    spread       standard deviation of the logarithm of measured over predicted
    """

    activations: float = 1.0
    base: float = 0.5
    gathered: float = 0.0
    slack: float = 0.05
    spread: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Memory(RankMemory):
    """Bytes of the fullest rank.

    ranks   those that it is the fullest of: `rank_memory.LOOKED_AT`
    spread  standard deviation of the logarithm of measured over predicted, for this stack
    """

    ranks: tuple[RankMemory, ...]
    spread: float


def memory(setup: Setup, cluster: Cluster) -> Memory:
    """What the ranks of a layout need; of many layouts at once where the setup's numbers are arrays."""
    return memory_on(setup, cluster.device.kind)


def memory_on(setup: Setup, kind: DeviceKind) -> Memory:
    """The same where only the kind of the devices is known."""
    return fullest(ours(setup, kind), *_around(setup, kind))


def on_device(allocated: Figure, setup: Setup, cluster: Cluster) -> Figure:
    """What a rank takes of its device when its tensors take `allocated` bytes."""
    constants, buffers = _around(setup, cluster.device.kind)
    return allocated * (1 + constants.slack) + buffers


def _around(setup: Setup, kind: DeviceKind) -> tuple[MemoryConstants, Figure]:
    """What there is beside our own tensors, which are counted and need no base."""
    if kind == "cpu":
        # Memory is given back to the system as it is freed, and messages go through sockets.
        return MemoryConstants(base=0.0, slack=0.0, spread=OUR_SPREAD), 0.0
    return MemoryConstants(base=0.0, spread=OUR_SPREAD), outside(setup)


def outside(setup: Setup) -> Figure:
    """Bytes that a rank takes of a GPU outside the allocator.

    It has a communicator for all ranks together, and for each axis that splits anything.
    """
    data = setup.data_ranks * setup.cp
    degrees = (setup.ranks, data, setup.cp, setup.tp, setup.pp, setup.ep)
    return CONTEXT + COMMUNICATOR * sum(1 * (degree > 1) for degree in degrees)


def fullest(tensors: Sequence[RankMemory], constants: MemoryConstants, buffers: Figure) -> Memory:
    """Of ranks with these tensors, `rank_memory.LOOKED_AT`: the fullest, with what its stack adds."""
    ranks = tuple(
        replace(
            rank,
            activations=constants.activations * rank.activations,
            transient=constants.activations * rank.transient + constants.base * GIB,
            buffers=buffers,
            slack=constants.slack,
        )
        for rank in tensors
    )
    return Memory(**vars(reduce(_fuller, ranks)), ranks=ranks, spread=constants.spread)


def _fuller(one: RankMemory, other: RankMemory) -> RankMemory:
    """Of each layout, the rank that needs more of its device."""
    more = one.device >= other.device
    figures: Any = (choose(more, getattr(one, f.name), getattr(other, f.name)) for f in fields(RankMemory))
    return RankMemory(*figures)


def usable_gib(device: Device) -> float:
    """What can be had of a device's memory."""
    return device.memory_gib * (1.0 if device.is_host else 1 - UNUSABLE)


RISK = 0.1
"""A layout fits when it runs out of memory with at most this chance."""


def fits(needed: Memory, cluster: Cluster) -> Any:
    """Whether a layout can be counted on to fit; of many layouts, for each."""
    return np.asarray(needed.device) <= counted_on(cluster, needed.spread) * GIB


def counted_on(cluster: Cluster, spread: float = OUR_SPREAD) -> float:
    """GiB that a layout may need, by the planner's figure, and still fit."""
    return usable_gib(cluster.device) * math.exp(-NormalDist().inv_cdf(1 - RISK) * spread)


def chance_of_running_out(needed: Memory, cluster: Cluster) -> Figure:
    """How likely it is that the fullest rank needs more than its device has, from 0 to 1.

    Measured over predicted is taken as log-normal, with the spread seen in the back-test.
    """
    return chance_of(needed.device, usable_gib(cluster.device) * GIB, needed.spread)


def chance_of(needed: Figure, there: float, spread: float = OUR_SPREAD) -> Figure:
    """As `chance_of_running_out`, of needed bytes by the planner's figure, and bytes to be had."""
    scores = np.log(needed / there) / spread
    found: Figure = np.vectorize(NormalDist().cdf, otypes=[float])(scores)
    return found
