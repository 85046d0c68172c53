"""Software stacks: what sets each apart in time, the name of its memory profile, and its fitted constants.

Our own stack is described by our ledger. The others' programs differ from ours in the ways named here (what
is fused, what is overlapped, which attention kernel), and never change our own figures. What no description
gives is fitted on published runs: at most two constants for a stack on a device, in `constants.json`, by
`fivefold backtest --fit`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from fivefold.hardware.devices import find_device
from fivefold.planner.fitted import TIME_CONSTANTS
from fivefold.planner.memory_profiles import LEDGER
from fivefold.planner.placement import Cut, by_cost, evenly, later_longer, ours
from fivefold.problems import BadInput, Problem, did_you_mean

TYPICAL = "typical"
"""In the file of constants: what the stacks on a device have on average."""

Attention = Literal["unfused", "flash-1", "flash-2", "flash-3"]


@dataclass(frozen=True)
class Constants:
    """What a stack reaches on a device.

    matmul   fraction of the device's peak that large matrix products reach
    launch   seconds of the host's time for each kernel: a part cannot be faster than its kernels are started
    network  bandwidth between servers relative to what planner/collectives.py has for their network
    attention  rate of fused attention relative to what its kernel's authors publish
    experts  rate of the experts' products relative to that of one dense product of their size
    """

    matmul: float = 0.7
    launch: float = 8e-6
    network: float = 1.0
    experts: float = 0.8
    attention: float = 1.0


@dataclass(frozen=True)
class Stack:
    """One version of a training program.

    memory          the name of its description in memory_profiles.py; `LEDGER`: counted, as ours is
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
    host_waits      the host waits for collectives: each rank of a tp group adds so much to its time under a
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
    cut: Cut = field(default=evenly, kw_only=True)
    attention: Attention = "flash-2"
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
    bus: tuple[tuple[str, tuple[tuple[int, float], ...]], ...] = ()
    sums_whole: bool = False
    blocking: bool = False
    early_stop: bool = False
    broadcasts: bool = False
    scatters: bool = True
    fits: tuple[str, ...] = ("matmul", "launch")


PLAYBOOK_BUS = (
    ("all_reduce", ((1, 436e9), (2, 362e9), (4, 160e9), (8, 100e9), (16, 85e9), (32, 65e9), (64, 33e9))),
    ("all_gather", ((1, 250e9), (2, 185e9), (4, 119e9), (8, 69e9), (16, 55e9), (32, 28e9), (64, 11e9))),
)
"""The Ultrascale playbook's own measurements, in bus bandwidth."""

_STACKS = (
    Stack(
        "fivefold",
        memory=LEDGER,
        cut=ours,
        selective="memory",
        joined=False,
        scatters=False,
        early_stop=True,
        fits=(),
    ),
    # Nobody has published the memory of Meta's program; Megatron-core splits a model the same way.
    Stack(
        "llama3",
        "flash-2",
        memory="megatron-core",
        traffic=0.6,
        tp_hidden=0.3,
        dp_hidden=1.0,
        fits=("matmul", "attention"),
    ),
    Stack(
        "megatron-2021",
        "unfused",
        memory="megatron",
        dp_hidden=0.0,
        gather_hidden=0.0,
        gradient_bytes=2,
        traffic=0.9,
        fits=("matmul",),
    ),
    # Megatron's models under DeepSpeed's ZeRO 3, in fp16: the same optimizer as under ZeRO 1.
    Stack(
        "deepspeed",
        "unfused",
        memory="megatron-deepspeed",
        gradient_bytes=2,
        traffic=0.9,
        fits=("matmul", "network"),
    ),
    Stack(
        "megatron-2022",
        "unfused",
        memory="megatron",
        dp_hidden=0.0,
        gather_hidden=0.0,
        traffic=0.9,
        fits=("matmul",),
    ),
    Stack(
        "megatron-deepspeed",
        "unfused",
        memory="megatron-deepspeed",
        scatters=False,
        blocking=True,
        dp_hidden=0.0,
        gather_hidden=0.0,
        gradient_bytes=2,
        traffic=0.9,
        fits=("matmul", "launch"),
    ),
    # Its authors measured Megatron-DeepSpeed.
    Stack(
        "vtrain",
        "unfused",
        memory="megatron-deepspeed",
        scatters=False,
        dp_hidden=0.0,
        gather_hidden=0.0,
        gradient_bytes=2,
        fits=("matmul", "launch"),
    ),
    # ByteDance's branch of Megatron, with flash attention.
    Stack(
        "megascale",
        "flash-2",
        memory="megatron-core",
        traffic=0.6,
        tp_hidden=0.3,
        fits=("matmul", "network"),
    ),
    Stack("megatron-core", "flash-2", memory="megatron-core", traffic=0.6, tp_hidden=0.5, fits=("matmul",)),
    Stack(
        "nemo",
        "flash-3",
        memory="nemo",
        traffic=0.6,
        tp_hidden=0.6,
        gradient_bytes=2,
        fits=("matmul", "experts"),
    ),
    # Megatron-core of 2025. Its recipes differ in how they save memory, and none of it was published.
    Stack(
        "megatron-moe",
        "flash-3",
        memory="megatron-core",
        traffic=0.6,
        tp_hidden=0.6,
        ep_hidden=0.5,
        fits=("matmul", "experts"),
    ),
    Stack(
        "simumax",
        "flash-3",
        memory="simumax",
        traffic=0.6,
        dp_hidden=0.0,
        gather_hidden=0.0,
        fits=("matmul",),
    ),
    # Shards float32 weights and moments, and gathers 16-bit copies: as torchtitan does, by another compiler.
    Stack("maxtext", "flash-3", memory="torchtitan", traffic=0.6, fits=("matmul",)),
    Stack(
        "zero-bubble",
        "unfused",
        memory="zero-bubble",
        dp_hidden=0.0,
        gather_hidden=0.0,
        fits=("matmul", "launch"),
    ),
    Stack(
        "torchtitan",
        "flash-2",
        memory="torchtitan",
        traffic=0.6,
        early_stop=True,
        selective="products",
        fits=("matmul",),
    ),
    Stack(
        "torchtitan-eager",
        "flash-2",
        memory="torchtitan",
        traffic=1.3,
        early_stop=True,
        selective="products",
        fits=("matmul",),
    ),
    # FSDP, as torchtitan.
    Stack(
        "fms-fsdp",
        "flash-2",
        memory="torchtitan",
        traffic=0.6,
        selective="blocks",
        gradient_bytes=2,
        fits=("matmul",),
    ),
    Stack(
        "llm-foundry",
        "flash-1",
        memory="llm-foundry",
        gradient_bytes=2,
        early_stop=True,
        fits=("matmul", "attention"),
    ),
    Stack(
        "internevo",
        "flash-2",
        memory="internevo",
        cut=later_longer,
        broadcasts=True,
        gradient_bytes=2,
        fits=("matmul", "network"),
    ),
    Stack(
        "nanotron",
        "flash-2",
        memory="nanotron",
        cut=by_cost,
        traffic=1.3,
        dp_hidden=0.5,
        gather_hidden=0.0,
        optimizer_bytes=90.0,  # a kernel for each operation of AdamW
        host_waits=0.55,
        bus=PLAYBOOK_BUS,
        sums_whole=True,
        fits=("matmul", "launch"),
    ),
    # Its published runs are FSDP's.
    Stack("primus", "flash-3", memory="torchtitan", fits=("matmul",)),
    # Attention scores are written out, as in Megatron of its day; the rest of its memory is not known.
    Stack("palm", "unfused", memory="megatron", traffic=0.6, fits=("matmul",)),
)


@cache
def _named() -> dict[str, Stack]:
    stacks = {stack.name: stack for stack in _STACKS}
    for dtype, ending in (("float8", "-fp8"), ("float4", "-fp4")):
        for stack in _STACKS:
            stacks[stack.name + ending] = replace(stack, name=stack.name + ending, dtype=dtype)
    return stacks


def all_stacks() -> tuple[Stack, ...]:
    """Every stack that has a name."""
    return tuple(_named().values())


def stack_named(name: str) -> Stack:
    """The stack of that name; "-fp8" or "-fp4" after it: with matrix products in those."""
    stacks = _named()
    if name not in stacks:
        raise BadInput([Problem("stack", f"there is no stack '{name}'", did_you_mean(name, stacks))])
    return stacks[name]


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


OURS = stack_named("fivefold")
