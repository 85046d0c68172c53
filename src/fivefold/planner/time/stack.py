"""What a training program makes of a device: how our own runs, and how others' differ from it.

Our own is described by our ledger. The others (`backtest/stacks.toml`) differ in the ways named here (what
is fused, what is overlapped, which attention kernel), and never change our own figures. What no description
gives is fitted on published runs: at most two constants for a stack on a device, in `constants.json`, by
`fivefold backtest --fit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fivefold.hardware.devices import find_device
from fivefold.planner.placement import Cut, ours
from fivefold.planner.time.fitted import TIME_CONSTANTS

TYPICAL = "typical"
"""In the file of constants: what the stacks on a device have on average."""


@dataclass(frozen=True)
class Constants:
    """What a stack reaches on a device.

    matmul   fraction of the device's peak that large matrix products reach
    launch   seconds of the host's time for each kernel: a part cannot be faster than its kernels are started
    network  bandwidth between servers relative to what collectives.py has for their network
    attention  rate of fused attention relative to what its kernel's authors publish
    experts  rate of the experts' products relative to that of one dense product of their size
    """

    matmul: float = 0.7
    launch: float = 8e-6
    network: float = 1.0
    experts: float = 0.8
    attention: float = 1.0


LEDGER = "ledger"
"""In place of the name of a memory profile: our own program, whose tensors the ledger counts."""


@dataclass(frozen=True)
class Stack:
    """One version of a training program.

    memory          the name of its description in backtest/stacks.toml; `LEDGER`: counted, as ours is
    cut             how it cuts a model into the stages of a pipeline
    attention       its kernel
    traffic         bytes that operations bound by memory move, relative to ours: one kernel an operation
    kernels         kernels that are started for each operation bound by memory, likewise
    joined          query, key and value are one product, and gate and up another
    dtype           what goes into matrix products, where it is not the training precision
    hidden          axis -> part of its messages that run behind compute where there is room for them
    gradient_bytes  a gradient's size when it is summed over the data ranks
    optimizer_bytes moved by the optimizer for each weight it updates
    selective       what "selective" recomputation repeats: "attention" (scores to values), "products" (half
                    of the products, and what is bound by memory), "blocks" (half of them), "memory" (ours)
    host_waits      the host waits for collectives: each rank of a tp group adds this part of its time under a
                    pipeline, and without one it takes as many times longer as the group has servers
    bus             operation -> (servers, bytes/s) that one collective over the data axis was measured to
                    reach on the cluster that the stack's runs are from
    sums_whole      ZeRO 1 sums whole gradients, not shards
    blocking        the host waits for each kernel before it starts the next
    early_stop      recomputation of a block ends before its last product, whose result nothing asks for
    broadcasts      ZeRO's ranks send each its own updated weights to all others, one after the other
    scatters        what all ranks of a tp group have (a stage's output, tokens for experts) is cut by tp when
                    it is sent
    fits            which constants are fitted, at most two
    """

    name: str
    memory: str = field(kw_only=True)
    cut: Cut = field(kw_only=True)
    attention: Literal["unfused", "flash-1", "flash-2", "flash-3"] = "flash-2"
    traffic: float = 1.0
    kernels: float = 1.0
    joined: bool = True
    dtype: str | None = None
    tp_hidden: float = 0.0
    ep_hidden: float = 0.0
    dp_hidden: float = 1.0
    gather_hidden: float = 1.0
    gradient_bytes: int = 4
    optimizer_bytes: float = 36.0
    selective: str = "attention"
    host_waits: float = 0.0
    bus: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    sums_whole: bool = False
    blocking: bool = False
    early_stop: bool = False
    broadcasts: bool = False
    scatters: bool = True
    fits: Sequence[str] = ("matmul", "launch")


OURS = Stack(
    "fivefold",
    memory=LEDGER,
    cut=ours,
    selective="memory",
    joined=False,
    scatters=False,
    early_stop=True,
    fits=(),
)


def constants_of(device: str, stack: Stack) -> Constants:
    """The fitted constants of a stack on a device.

    Where it was never fitted there: its constants on the device of the nearest peak; where it was fitted
    nowhere, what is typical of the device, or of the one of the nearest peak. An unknown device gets guesses.
    """
    table = TIME_CONSTANTS.table("constants")
    if find_device(device) is None:
        return Constants()
    for name in (stack.name, TYPICAL):
        places = [place for place in table if name in table[place]]
        if places:
            return Constants(**table[min(places, key=lambda place: _distance(device, place))][name])
    return Constants()


def _distance(one: str, other: str) -> tuple[bool, float]:
    """How unlike a device another one is."""
    devices = find_device(one), find_device(other)
    peaks = [each.peak_flops.get("bfloat16", 1e12) if each else 1e12 for each in devices]
    return one != other, abs(math.log(peaks[0] / peaks[1]))
