"""What a training program makes of a device: how our own runs, and how others' differ from it.

Our own is described by our ledger. The others (`backtest/stacks.toml`) differ in the ways named here (what
is fused, what is overlapped, which attention kernel), and never change our own figures. What no description
gives is fitted on published runs: at most two constants for a stack on a device, in `constants.json`, by
`fivefold backtest --fit`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from fivefold.hardware.devices import Device, find_device
from fivefold.planner.placement import Cut, ours
from fivefold.planner.time.fitted import TIME_CONSTANTS
from fivefold.planner.time.peaks import part_at, peak

TYPICAL = "typical"
"""In the file of constants: what stacks with products in 16 bits have on devices of a peak, on average."""


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


Kernel = Literal["unfused", "flash-1", "flash-2", "flash-3"]
LEDGER = "ledger"
"""In place of the name of a memory profile: our own program, whose tensors the ledger counts."""


@dataclass(frozen=True)
class Stack:
    """One version of a training program.

    memory          the name of its description in backtest/stacks.toml; `LEDGER`: counted, as ours is
    cut             how it cuts a model into the stages of a pipeline
    attention       its kernel
    pieces          the kernel of attention in pieces (ring, allgather), with our runtime's work around each;
                    None: that of `attention`, and what others do around it is in their constants
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
    attention: Kernel = "flash-2"
    pieces: Kernel | None = None
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
    attention="flash-3",  # cuDNN's, which is as fast; it does not say how much its keys count
    pieces="flash-2",
    selective="memory",
    joined=False,
    scatters=False,
    early_stop=True,
    fits=(),
)


def constants_of(device: Device, stack: Stack, dtype: str = "bfloat16") -> Constants:
    """The constants of a stack on a device, whose products take numbers of a dtype.

    Where it was fitted, its own. Elsewhere by the device's peak, between those of the devices where it was
    fitted, or, if nowhere, of those where others were (`TYPICAL`). The host, the network and the attention
    kernel have nothing to do with that peak: of them, what is usual of the stack.
    """
    table = TIME_CONSTANTS.table("constants")
    if stack.name in table.get(device.name, {}):
        return Constants(**table[device.name][stack.name])
    ever = any(stack.name in fitted for fitted in table.values())
    name, fitted_in = (stack.name, stack.dtype or "bfloat16") if ever else (TYPICAL, "bfloat16")
    known = [
        (peak(place, fitted_in), Constants(**fitted[name]))
        for place, fitted in ((find_device(place), fitted) for place, fitted in table.items())
        if place is not None and name in fitted
    ]
    if not known:
        return Constants()
    usual = {key: median(getattr(one, key) for _, one in known) for key in ("launch", "network", "attention")}
    here = peak(device, stack.dtype or dtype)
    matmul = part_at(here, ((at, one.matmul) for at, one in known))
    experts = part_at(here, ((at, one.matmul * one.experts) for at, one in known)) / matmul
    return Constants(matmul=matmul, experts=experts, **usual)
