"""How long one part of the model takes for one micro-batch on one rank: its work, and the messages around it.

Work comes from the ledger, messages from the axes. A stack may run them otherwise than we do (stack.py):
products joined, kernels fused, messages hidden. Times may be arrays over many layouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from fivefold.axes.messages import Messages, Traffic, traffic
from fivefold.hardware.cluster import Cluster
from fivefold.ledger.ledger import Message, joined, repeated
from fivefold.ledger.setup import Figure, Number, Setup
from fivefold.ledger.work import Phase, Work, block_work, embedding_work, head_work, recomputed
from fivefold.planner.placement import rank_layers
from fivefold.planner.time.collectives import message_time, strides
from fivefold.planner.time.rates import work_time
from fivefold.planner.time.stack import OURS, Constants, Stack, constants_of
from fivefold.replay.eager import eager

SLOWDOWN = 0.12
"""What a message that runs behind a GPU's compute costs all the same, in parts of its own time: it takes some
of the multiprocessors and of the memory's bandwidth."""
TP_OVERLAP = 0.7
"""The part of tp messages that is hidden where they are fused with the products before and after them."""
JOINED = ({"attention.query", "attention.key", "attention.value"}, {"mlp.gate", "mlp.up"})
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
    exposed: dict[str, Figure] = field(default_factory=dict)

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
        found = constants or constants_of(cluster.device.name, stack)
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
        """What a message that runs behind compute costs all the same, in parts of its own time."""
        return 1.0 if self.cluster.device.is_host else SLOWDOWN

    @cached_property
    def layers(self) -> tuple[Any, Any, Any]:
        """As `rank_layers`: of the pipeline's first rank, of those between, of the last."""
        return rank_layers(self.setup, self.stack.cut)

    @property
    def most_layers(self) -> Any:
        """Of the rank that has the most."""
        first, between, last = self.layers
        return np.maximum(np.maximum(first, between), last)

    @cached_property
    def traffic(self) -> Traffic:
        return traffic(self.setup)

    @cached_property
    def strides(self) -> dict[str, Any]:
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
        one = message_time(self.network, message.operation, message.payload * scale, message.ranks, stride)
        return message.count * one

    def state_message(self, message: Message, scale: Figure = 1.0) -> Figure:
        """As `message`, of weights or gradients on the data axis."""
        measured = self.cluster.measured
        around = measured.sharded if measured is not None and self.setup.zero else 0.0
        return self.message(message, scale) + message.count * np.where(
            np.asarray(message.ranks) > 1, around, 0.0
        )

    def late(self, blocks: Number) -> Figure:
        """Seconds of what is sent between backward and the optimizer by a rank with so many blocks.

        Sums over tp and between the stages of a tied embedding, then the step's own. Other stacks' constants
        are fitted to whole steps, which have those sums in them wherever they are made.
        """
        found = self.traffic
        ends = [m for m in (*found.embedding_state, *found.head_state) if m.phase == "optimizer"]
        inner = repeated((m for m in found.block_state if m.phase == "optimizer"), blocks)
        sums = joined([*ends, *inner]) if self.ours else []
        total: Figure = 0.0
        for message in (*sums, *found.step):
            total = total + self.message(message)
        return total

    @cached_property
    def block(self) -> PartTime:
        """One block, one micro-batch."""
        work = block_work(self.setup)
        again = _repeated(self, work)
        phases = _compute(self, work, _host_factor(self))
        repeated = _compute(self, again)["backward-input"]
        attention = {
            "forward": _of_kind(self, work, "forward"),
            "backward": _of_kind(self, [*work, *again], "backward-input"),
        }
        messages = _exposed(self, self.traffic.block, attention)
        return self._as_cut(_part(phases, repeated, messages))

    @cached_property
    def embedding(self) -> PartTime:
        """The embedding, one micro-batch."""
        messages = _exposed(self, self.traffic.embedding, {})
        return _part(_compute(self, embedding_work(self.setup)), 0.0, messages)

    @cached_property
    def head(self) -> PartTime:
        """The last norm, the output projection and the loss, one micro-batch."""
        messages = _exposed(self, self.traffic.head, {})
        return self._as_cut(_part(_compute(self, head_work(self.setup)), 0.0, messages))

    def _as_cut(self, part: PartTime) -> PartTime:
        """Our own backward in one piece where it cannot be cut in two; the same under every schedule."""
        if not self.ours or self.setup.can_split_backward:
            return part
        return replace(part, backward_input=part.backward, backward_weight=0.0 * part.backward)

    @cached_property
    def transfer(self) -> Figure:
        """One micro-batch's activations from a stage to the next."""
        sends = [m for m in self.traffic.boundary if m.operation == "send" and m.phase == "forward"]
        whole = not self.setup.sequence_parallel and self.stack.scatters
        took: Figure = 0.0
        for message in sends:
            cut = replace(message, payload=message.payload // self.setup.tp) if whole else message
            took = took + self.message(cut)
        return took


def _part(phases: dict[Phase, Figure], repeated: Figure, messages: dict[str, dict[str, Figure]]) -> PartTime:
    waits = {phase: sum(took.values()) for phase, took in messages.items()}
    axes = {axis for took in messages.values() for axis in took}
    return PartTime(
        phases["forward"] + waits.get("forward", 0.0),
        phases["backward-input"] + repeated + waits.get("backward", 0.0),
        phases["backward-weight"],
        {axis: sum(took.get(axis, 0.0) for took in messages.values()) for axis in sorted(axes)},
    )


# --- compute -------------------------------------------------------------------------------------------


def _compute(costs: Costs, work: Iterable[Work], host_factor: Figure = 1.0) -> dict[Phase, Figure]:
    """Seconds by phase: the device's time, or the host's to start the kernels where that is longer.

    Both where they are one, or wait for each other.
    """
    device: dict[Phase, Any] = dict.fromkeys(PHASES, 0.0)
    host: dict[Phase, Any] = dict.fromkeys(PHASES, 0.0)
    for item in _as_run(costs, work):
        device[item.phase] = device[item.phase] + _work_time(costs, item)
        host[item.phase] = host[item.phase] + item.count * _kernels(costs, item) * costs.constants.launch
    both = np.add if costs.stack.blocking or costs.cluster.device.is_host else np.maximum
    return {phase: both(device[phase], host[phase] * host_factor) for phase in PHASES}


def _kernels(costs: Costs, item: Work) -> float:
    """How many kernels of an operation the host has to start."""
    if item.kind == "memory":
        return costs.stack.kernels
    if costs.cluster.device.is_host and costs.cluster.measured:  # whose rates have it in them
        return 0.0
    return 4.0 if item.kind == "attention" and costs.stack.attention == "unfused" else 1.0


def _work_time(costs: Costs, item: Work) -> Any:
    return work_time(item, costs.cluster, costs.setup.precision.compute, costs.stack, costs.constants)


def _of_kind(costs: Costs, work: Iterable[Work], phase: Phase) -> Any:
    """Seconds of attention in a phase: what ring messages run behind."""
    return sum(
        (_work_time(costs, item) for item in work if item.kind == "attention" and item.phase == phase), 0.0
    )


def _host_factor(costs: Costs) -> Figure:
    """How many times longer the host takes over a block because it waits for tp ranks."""
    if not costs.stack.host_waits:
        return 1.0
    tp = np.asarray(costs.setup.tp)
    spread = np.maximum(1.0, tp / costs.cluster.server)
    piped = 1.0 + costs.stack.host_waits * np.where(tp > 1, tp, 0)
    return np.where(costs.setup.piped, np.maximum(piped, spread), spread)


def _as_run(costs: Costs, work: Iterable[Work]) -> list[Work]:
    """The work as the stack runs it: products that share an input are one."""
    if not costs.stack.joined:
        return list(work)
    found: dict[tuple[int, str], Work] = {}
    rest = []
    for item in work:
        group = next((n for n, names in enumerate(JOINED) if item.what in names), None)
        if item.kind != "matmul" or group is None:
            rest.append(item)
        elif (group, item.phase) not in found:
            found[group, item.phase] = item
        else:
            found[group, item.phase] = _joined(found[group, item.phase], item)
    return [*found.values(), *rest]


def _joined(one: Work, other: Work) -> Work:
    """Two products as one: side by side along the dimension that the forward's columns are."""
    side = {"forward": "columns", "backward-input": "inner", "backward-weight": "rows"}[one.phase]
    sizes: dict[str, Any] = {side: getattr(one, side) + getattr(other, side)}
    return replace(one, flops=one.flops + other.flops, moved=one.moved + other.moved, **sizes)


def _repeated(costs: Costs, work: list[Work]) -> list[Work]:
    """What recomputation adds to a block's work."""
    mode, stack = costs.setup.recompute, costs.stack
    if mode == "none":
        return []
    again = recomputed(work, last=mode == "full" and stack.early_stop)
    if mode != "selective":
        return again
    if stack.selective == "attention":
        return [item for item in again if item.kind == "attention"]
    if stack.selective == "memory":
        return [item for item in again if item.kind == "memory"]
    halved = "matmul" if stack.selective == "products" else ""
    return [_half(item) if not halved or item.kind == halved else item for item in again]


def _half(item: Work) -> Work:
    """Every second time."""
    return replace(item, flops=item.flops / 2, moved=item.moved / 2, rows=-(-item.rows // 2))


# --- messages ------------------------------------------------------------------------------------------


def _exposed(costs: Costs, messages: Messages, attention: dict[str, Figure]) -> dict[str, dict[str, Figure]]:
    """Seconds that a part waits for its messages: phase -> axis -> seconds."""
    waits: dict[str, dict[str, Any]] = {}
    behind_attention: dict[tuple[str, str], Any] = {}
    for message in messages:
        if message.operation == "recv":  # It comes while this rank sends.
            continue
        axis = message.group if message.group in ("tp", "cp") else "ep"
        cut = costs.setup.tp if axis == "ep" and costs.stack.scatters else 1
        took = costs.message(replace(message, payload=message.payload // cut))
        if message.hides_behind == "attention":
            key = message.phase, axis
            behind_attention[key] = behind_attention.get(key, 0.0) + took
            continue
        seen = 1 - _hidden(costs, axis, message)
        phase = waits.setdefault(message.phase, {})
        phase[axis] = phase.get(axis, 0.0) + took * seen
    for (phase_name, axis), took in behind_attention.items():
        phase = waits.setdefault(phase_name, {})
        phase[axis] = phase.get(axis, 0.0) + left(took, attention.get(phase_name, 0.0), costs.slowdown)
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
