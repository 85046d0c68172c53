"""How long one part of the model takes for one micro-batch on one rank: its work, and the messages around it.

Work comes from the ledger, messages from the axes. A stack may run them otherwise than we do (stack.py):
products joined, kernels fused, messages hidden. Times may be arrays over many layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fivefold.axes.messages import Messages, Traffic
from fivefold.axes.outer import STEPS
from fivefold.axes.pieces import Part
from fivefold.hardware.cluster import Cluster
from fivefold.ledger.ledger import Message, joined, repeated
from fivefold.ledger.setup import Figure, Number, Setup
from fivefold.ledger.work import Phase, Work, block_work, embedding_work, head_work, recomputed
from fivefold.planner.placement import most_layers
from fivefold.planner.time.collectives import message_time, strides
from fivefold.planner.time.constants import Constants, constants_of
from fivefold.planner.time.rates import work_time
from fivefold.planner.time.stack import OURS, Stack
from fivefold.replay.eager import eager

SLOWDOWN = 0.12
"""What a message that runs behind a GPU's compute costs all the same, in parts of its own time: it takes some
of the multiprocessors and of the memory's bandwidth."""
TP_OVERLAP = 0.7
"""The part of tp messages that is hidden where they are fused with the products before and after them."""
JOINED = {
    **dict.fromkeys(("attention.query", "attention.key", "attention.value"), "attention"),
    **dict.fromkeys(("mlp.gate", "mlp.up"), "mlp"),
}
"""Products that share an input, and that many stacks run as one."""
PHASES: tuple[Phase, ...] = ("forward", "backward-input", "backward-weight")


@dataclass(frozen=True)
class PartTime:
    """Seconds of one part of the model for one micro-batch on one rank, exposed messages included.

    exposed  axis -> seconds of the three together in which only messages of that axis run
    """

    forward: Figure
    backward_input: Figure
    backward_weight: Figure
    exposed: dict[str, Figure]

    @property
    def backward(self) -> Figure:
        return self.backward_input + self.backward_weight

    @property
    def total(self) -> Figure:
        return self.forward + self.backward


@dataclass(frozen=True)
class Costs:
    """What all times of a setup are computed with."""

    setup: Setup
    cluster: Cluster
    stack: Stack
    constants: Constants

    @classmethod
    def of(
        cls, setup: Setup, cluster: Cluster, stack: Stack = OURS, constants: Constants | None = None
    ) -> Costs:
        found = constants or constants_of(cluster.device, stack, setup.precision.compute)
        if cluster.measured is not None:
            found = replace(found, launch=cluster.measured.launch)
        if stack.name == OURS.name and not setup.compile:
            ran = eager(setup.spec, cluster.device.kind)
            stack = replace(stack, kernels=ran.kernels, traffic=ran.traffic)
        return cls(setup, cluster, stack, found)

    @property
    def ours(self) -> bool:
        """Whether it is our own program that runs."""
        return self.stack.name == OURS.name

    @property
    def slowdown(self) -> float:
        """As `SLOWDOWN`; where the host computes, nothing runs behind it."""
        return 1.0 if self.cluster.device.is_host else SLOWDOWN

    @cached_property
    def most_layers(self) -> Number:
        """Of the pipeline's rank that has the most."""
        return most_layers(self.setup, self.stack.cut)

    @cached_property
    def traffic(self) -> Traffic:
        return Traffic(self.setup)

    @cached_property
    def strides(self) -> dict[str, Number]:
        return strides(self.setup)

    @cached_property
    def network(self) -> Cluster:
        """The cluster, its links between servers as fast as this stack has them."""
        inner, *outer = self.cluster.levels
        slowed = (replace(level, bandwidth=level.bandwidth * self.constants.network) for level in outer)
        return replace(self.cluster, levels=(inner, *slowed))

    def message(self, message: Message, scale: Figure = 1.0) -> Figure:
        """Seconds of all `count` of a message, its payload times `scale`."""
        stride = self.strides[message.group]
        one = message_time(self.network, message.operation, message.with_own * scale, message.ranks, stride)
        return message.count * one

    @property
    def late(self) -> Figure:
        """Seconds of what is sent between backward and the next step by the rank with the most layers.

        Sums over tp and between the stages of a tied embedding, then the step's own, and what an outer step
        waits for. Other stacks' constants are fitted to whole steps, which have those sums in them wherever
        they are made.
        """
        return sum((self.message(m) for m in self._behind_backward if m.hides_behind != STEPS), 0.0)

    @property
    def travelling(self) -> Figure:
        """Seconds a step of averages that are on their way while steps go on."""
        return sum((self.message(m) for m in self._behind_backward if m.hides_behind == STEPS), 0.0)

    @cached_property
    def _behind_backward(self) -> list[Message]:
        found = self.traffic
        ends = [m for m in (*found.state["embedding"], *found.state["head"]) if m.phase == "optimizer"]
        inner = repeated((m for m in found.state["block"] if m.phase == "optimizer"), self.most_layers)
        return [*(joined([*ends, *inner]) if self.ours else []), *found.step]

    @cached_property
    def work(self) -> dict[Part, tuple[list[Work], list[Work]]]:
        """What each part computes of a micro-batch, and what recomputation repeats of it."""
        block = block_work(self.setup)
        return {
            "embedding": (embedding_work(self.setup), []),
            "block": (block, _repeated(self, block)),
            "head": (head_work(self.setup), []),
        }

    @cached_property
    def block(self) -> PartTime:
        """One block, one micro-batch."""
        return self._part(*self.work["block"], self.traffic.block, _host_factor(self))

    @cached_property
    def embedding(self) -> PartTime:
        """The embedding, one micro-batch."""
        return self._part(*self.work["embedding"], self.traffic.embedding)

    @cached_property
    def head(self) -> PartTime:
        """The last norm, the output projection and the loss, one micro-batch."""
        return self._part(*self.work["head"], self.traffic.head)

    def _part(
        self, work: list[Work], again: list[Work], messages: Messages, host_factor: Figure = 1.0
    ) -> PartTime:
        """A part's work, what recomputation repeats of it, and its messages."""
        ran, beside = _compute(self, work, host_factor)
        repeated, beside_repeated = (found["backward-input"] for found in _compute(self, again))
        forward = _exposed(self, messages, "forward", beside["forward"])
        backward = _exposed(self, messages, "backward", beside["backward-input"] + beside_repeated)
        found = PartTime(
            ran["forward"] + sum(forward.values()),
            ran["backward-input"] + repeated + sum(backward.values()),
            ran["backward-weight"],
            {axis: forward[axis] + backward[axis] for axis in sorted({*forward, *backward})},
        )
        if not self.ours or self.setup.can_split_backward:
            return found
        # Our own backward is in one piece then, under every schedule.
        return replace(found, backward_input=found.backward, backward_weight=0.0 * found.backward)

    @cached_property
    def transfer(self) -> Figure:
        """One micro-batch's activations from a stage to the next."""
        sends = [m for m in self.traffic.boundary if m.operation == "send" and m.phase == "forward"]
        pieces = self.setup.tp if self.stack.scatters and not self.setup.sequence_parallel else 1
        return sum((self.message(replace(m, payload=m.payload // pieces)) for m in sends), 0.0)


def _compute(
    costs: Costs, work: Iterable[Work], host_factor: Figure = 1.0
) -> tuple[dict[Phase, Figure], dict[Phase, Figure]]:
    """Seconds by phase: the device's time, or the host's to start the kernels where that is longer.

    Both where they are one, or wait for each other. And those in which the device does nothing but attention:
    ring messages run behind them.
    """
    none: dict[Phase, Any] = dict.fromkeys(PHASES, 0.0)
    attention, others, host = none.copy(), none.copy(), none.copy()
    for item, took in device_times(costs, work):
        device = attention if item.kind == "attention" else others
        device[item.phase] = device[item.phase] + took
        host[item.phase] = host[item.phase] + item.count * _kernels(costs, item) * costs.constants.launch
    both = np.add if costs.stack.blocking or costs.cluster.device.is_host else np.maximum
    found = {phase: both(attention[phase] + others[phase], host[phase] * host_factor) for phase in PHASES}
    return found, {phase: found[phase] - others[phase] for phase in PHASES}


def device_times(costs: Costs, work: Iterable[Work]) -> Iterator[tuple[Work, Figure]]:
    """The work as it is run, each with the seconds that the device takes for it."""
    for item in _as_run(costs, work):
        dtype = costs.setup.precision.compute
        yield item, work_time(item, costs.cluster, dtype, costs.stack, costs.constants)


def _kernels(costs: Costs, item: Work) -> float:
    """How many kernels of an operation the host has to start."""
    if item.kind == "memory":
        return costs.stack.kernels
    started = item.starts if costs.stack.pieces else 1
    if costs.cluster.device.is_host and costs.cluster.measured:
        return started - 1.0  # its rates have the operation's own in them
    return started + (3.0 if item.kind == "attention" and costs.stack.attention == "unfused" else 0.0)


def _host_factor(costs: Costs) -> Figure:
    """How many times longer the host takes over a block because it waits for tp ranks."""
    if not costs.stack.host_waits:
        return 1.0
    tp = np.asarray(costs.setup.tp)
    spread = np.maximum(1.0, tp / costs.cluster.server)
    piped = 1.0 + costs.stack.host_waits * np.where(tp > 1, tp, 0)
    return np.where(costs.setup.pp > 1, np.maximum(piped, spread), spread)


def _as_run(costs: Costs, work: Iterable[Work]) -> Iterable[Work]:
    """The work as the stack runs it: products that share an input are one."""
    if not costs.stack.joined:
        return work
    found: dict[Any, Work] = {}
    for number, item in enumerate(work):
        key = (JOINED[item.what], item.phase) if item.what in JOINED else number
        found[key] = _joined(found[key], item) if key in found else item
    return found.values()


def _joined(one: Work, other: Work) -> Work:
    """Two products as one: side by side along the dimension that the forward's columns are."""
    side = {"forward": "columns", "backward-input": "inner", "backward-weight": "rows"}[one.phase]
    sizes: dict[str, Any] = {side: getattr(one, side) + getattr(other, side)}
    return replace(one, flops=one.flops + other.flops, moved=one.moved + other.moved, **sizes)


def _repeated(costs: Costs, work: list[Work]) -> list[Work]:
    """What recomputation adds to a block's work."""
    mode, shares = costs.setup.recompute, costs.stack.selective
    if mode == "none":
        return []
    again = recomputed(work, last=mode == "full" and costs.stack.early_stop)
    if mode != "selective":
        return again
    return [_share(item, shares[item.kind]) for item in again if item.kind in shares]


def _share(item: Work, part: float) -> Work:
    return replace(item, flops=item.flops * part, moved=item.moved * part, rows=np.ceil(item.rows * part))


def _exposed(costs: Costs, messages: Messages, phase: str, attention: Figure) -> defaultdict[str, Figure]:
    """Axis -> seconds that a part waits for its messages of a phase, whose attention takes so long."""
    waits: defaultdict[str, Figure] = defaultdict(float)
    behind_attention: defaultdict[str, Figure] = defaultdict(float)
    for message in messages:
        if message.phase != phase or message.operation == "recv":  # It comes while this rank sends.
            continue
        axis = message.group if message.group in ("tp", "cp") else "ep"
        pieces = costs.setup.tp if axis == "ep" and costs.stack.scatters else 1
        took = costs.message(replace(message, payload=message.payload // pieces))
        if message.hides_behind == "attention":
            behind_attention[axis] = behind_attention[axis] + took
        else:
            waits[axis] = waits[axis] + took * (1 - _hidden(costs, axis, message))
    for axis, took in behind_attention.items():
        waits[axis] = waits[axis] + left(took, attention, costs.slowdown)
    return waits


def _hidden(costs: Costs, axis: str, message: Message) -> float:
    if costs.cluster.device.is_host:
        return 0.0
    if axis == "tp":
        return TP_OVERLAP if message.hides_behind is not None else costs.stack.tp_hidden
    return costs.stack.ep_hidden if axis == "ep" else 0.0


def left(messages: Figure, compute: Figure, slowdown: float) -> Figure:
    """What messages behind compute add to it: they slow it, or are still under way when it ends."""
    return np.maximum(messages - compute, slowdown * messages)
