"""Memory of the fullest rank: what is held, what comes and goes, what the allocator and the driver add.

Three figures are told apart. `allocated` is what tensors take at their peak; `reserved` is what torch's
allocator has taken from the device for them, never less; `device` is what the device has given away in all:
the driver's context and the buffers of communicators stand outside the allocator.

A pipeline's ranks differ: first, middle and last stage are computed each, and the fullest decides. Every
number may be an array over many layouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from fivefold.hardware.cluster import Cluster
from fivefold.hardware.devices import Device
from fivefold.ledger.setup import Figure, Number, Setup
from fivefold.planner.memory.our_tensors import ours
from fivefold.planner.memory.tensors import Tensors

GIB = 2**30
CONTEXT = 0.5 * GIB
"""A CUDA context and the kernels it loads: an assumption."""
COMMUNICATOR = 0.4 * GIB
"""Buffers of one NCCL communicator: an assumption, a bit below the 0.5 to 0.7 GB that NVIDIA/nccl issue 964
has for a group on 4 A100s. (Issue 864 has 1.6 GB for one.)"""
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


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank: each part at its most, and all together at the fullest moment of a step.

    Under our own stack not all parts are there at that moment, and `allocated` may be less than their sum.

    number       position along pp
    weights      as they compute, held through the step
    gradients    as they add up over micro-batches
    states       master weights, moments
    activations  kept for backward, of every micro-batch in flight
    transient    what comes and goes: the layer that computes, the loss, gathered layers, fresh gradients
    buffers      outside the allocator: communicators, the driver's context
    allocated, reserved, device  see the module
    """

    number: Number
    weights: Figure
    gradients: Figure
    states: Figure
    activations: Figure
    transient: Figure
    buffers: Figure
    allocated: Figure
    reserved: Figure
    device: Figure


@dataclass(frozen=True)
class Memory(StageMemory):
    """Bytes of the fullest rank, whose position along pp is `number`; and of the stages apart.

    middle  the fullest of those that are neither first nor last
    spread  standard deviation of the logarithm of measured over predicted, for this stack
    """

    first: StageMemory
    middle: StageMemory
    last: StageMemory
    spread: float

    @property
    def worst_stage(self) -> Number:
        return self.number


def memory(setup: Setup, cluster: Cluster) -> Memory:
    """What the ranks of a layout need; of many layouts at once where the setup's numbers are arrays.

    Our own tensors are counted, and need no base.
    """
    constants, buffers = MemoryConstants(base=0.0), outside(setup)
    if cluster.device.is_host:
        # Memory is given back to the system as it is freed, and messages go through sockets.
        constants, buffers = replace(constants, slack=0.0), 0.0
    ranks = ours(setup, cluster.device.kind)
    return combined([staged(rank, constants, buffers) for rank in ranks], constants)


def outside(setup: Setup) -> Figure:
    """Bytes that a rank takes of a GPU outside the allocator."""
    return CONTEXT + COMMUNICATOR * communicators(setup)


def staged(tensors: Tensors, constants: MemoryConstants, buffers: Figure) -> StageMemory:
    """The three figures of a rank, from its tensors."""
    moving = constants.activations * (tensors.activations + tensors.transient)
    allocated = tensors.rest + moving + constants.base * GIB - tensors.spared
    reserved = allocated * (1 + constants.slack)
    return StageMemory(
        number=tensors.number,
        weights=tensors.weights,
        gradients=tensors.gradients,
        states=tensors.states,
        activations=constants.activations * tensors.activations,
        transient=constants.activations * tensors.transient + constants.base * GIB,
        buffers=buffers,
        allocated=allocated,
        reserved=reserved,
        device=reserved + buffers,
    )


def combined(ranks: list[StageMemory], constants: MemoryConstants) -> Memory:
    """The fullest of the ranks of `ranks.LOOKED_AT`."""
    first, second, longest, head, last = ranks
    worst = fuller(fuller(fuller(first, longest), fuller(second, head)), last)
    every = {field.name: getattr(worst, field.name) for field in fields(StageMemory)}
    return Memory(
        **every, first=first, middle=fuller(second, longest), last=fuller(head, last), spread=constants.spread
    )


def fuller(one: StageMemory, other: StageMemory) -> StageMemory:
    """Of each layout, the rank that needs more of its device."""
    more = np.asarray(one.device) >= np.asarray(other.device)
    return StageMemory(
        *(_either(more, getattr(one, f.name), getattr(other, f.name)) for f in fields(StageMemory))
    )


def _either(condition: Any, this: Figure, that: Figure) -> Any:
    if not condition.ndim:
        return this if condition else that
    return np.where(condition, this, that)


def communicators(setup: Setup) -> Number:
    """How many groups of ranks a rank talks in: of all ranks, and of each axis that splits anything."""
    data = setup.dp_replicate * setup.dp_shard
    found: Any = 0
    for degree in (setup.ranks, data * setup.cp, setup.cp, setup.tp, setup.pp, setup.ep):
        found = found + np.asarray(np.asarray(degree) > 1, dtype=int)
    return found if found.ndim else int(found)


def usable_gib(device: Device) -> float:
    """What can be had of a device's memory."""
    return device.memory_gib * (1.0 if device.is_host else 1 - UNUSABLE)


RISK = 0.1
"""A layout fits when it runs out of memory with at most this chance."""


def fits(needed: Memory, cluster: Cluster) -> Any:
    """Whether a layout can be counted on to fit; of many layouts, for each."""
    return np.asarray(chance_of_running_out(needed, cluster)) <= RISK


def counted_on(needed: Memory, cluster: Cluster) -> float:
    """GiB that ONE layout may need, by the planner's figure, and still fit."""
    margin = NormalDist().inv_cdf(1 - RISK) * needed.spread
    return usable_gib(cluster.device) * math.exp(-margin)


def chance_of_running_out(needed: Memory, cluster: Cluster) -> Figure:
    """How likely it is that the fullest rank needs more than its device has, from 0 to 1.

    Measured over predicted is taken as log-normal, with the spread seen in the back-test.
    """
    return chance_of(needed, usable_gib(cluster.device))


def chance_of(needed: Memory, gib: float) -> Figure:
    """As `chance_of_running_out`, of a device with so much memory to be had."""
    score = np.log(np.asarray(needed.device, dtype=float) / (gib * GIB)) / needed.spread
    chance = _normal(score)
    return chance if chance.ndim else float(chance)


def _normal(score: Any) -> Any:
    """The normal distribution function. (numpy has no error function; this one is good to 1e-7.)"""
    return 0.5 * (1 + _erf(np.asarray(score) / math.sqrt(2)))


def _erf(x: Any) -> Any:
    """Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    powers = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    series = sum(factor * t**power for power, factor in enumerate(powers, start=1))
    return np.sign(x) * (1 - series * np.exp(-x * x))
