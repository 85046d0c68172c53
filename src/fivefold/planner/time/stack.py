"""How a training program runs: our own, and how others' differ from it.

Our own is described by our ledger. The others (`backtest/stacks.toml`) differ in the ways named here (what
is fused, what is overlapped, which attention kernel), and never change our own figures. What no description
gives is fitted (`constants.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fivefold.planner.placement import Cut, ours

Kernel = Literal["unfused", "flash-1", "flash-2", "flash-3"]
LEDGER = "ledger"
"""In place of the name of a memory profile: our own program, whose tensors the ledger counts."""


@dataclass(frozen=True)
class Stack:
    """One version of a training program."""

    name: str
    memory: str  # its description in backtest/stacks.toml; `LEDGER`: counted, as ours is
    cut: Cut  # how it cuts a model into the stages of a pipeline
    attention: Kernel = "flash-2"
    # The kernel of attention in pieces (ring, allgather), with our runtime's work around each piece.
    # None: as `attention`, and what others do around it is in their constants.
    pieces: Kernel | None = None
    traffic: float = 1.0  # bytes that operations bound by memory move, relative to one kernel an operation
    kernels: float = 1.0  # kernels that are started for each of them, likewise
    joined: bool = True  # query, key and value are one product, and gate and up another
    dtype: str | None = None  # what goes into matrix products, where it is not the training precision
    # Parts of messages that run behind compute where there is room: by axis, and of gathered weights.
    tp_hidden: float = 0.0
    ep_hidden: float = 0.0
    dp_hidden: float = 1.0
    gather_hidden: float = 1.0
    gradient_bytes: int = 4  # a gradient's size when it is summed over the data ranks
    optimizer_bytes: float = 36.0  # moved by the optimizer for each weight it updates
    # What "selective" recomputation repeats: kind of work -> share of it.
    selective: Mapping[str, float] = field(default_factory=lambda: {"attention": 1.0})
    # The host waits for collectives: each rank of a tp group adds this part of its time under a pipeline, and
    # without one it takes as many times longer as the group has servers.
    host_waits: float = 0.0
    # Operation -> (servers, bytes/s) that one collective over the data axis was measured to reach on the
    # cluster that the stack's runs are from.
    bus: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    sums_whole: bool = False  # ZeRO 1 sums whole gradients, not shards
    blocking: bool = False  # the host waits for each kernel before it starts the next
    early_stop: bool = False  # recomputation of a block ends before its last product, which nothing asks for
    broadcasts: bool = False  # ZeRO's ranks send each its updated weights to all others, one after the other
    scatters: bool = True  # what all tp ranks have (a stage's output, experts' tokens) is cut by tp when sent
    fits: Sequence[str] = ()  # which of `Constants` are fitted, at most two


OURS = Stack(
    "fivefold",
    memory=LEDGER,
    cut=ours,
    attention="flash-3",  # cuDNN's, which is as fast
    pieces="flash-3",  # the same; with documents in a sequence it is flash-2
    selective={"memory": 1.0},
    joined=False,
    scatters=False,
    early_stop=True,
)
