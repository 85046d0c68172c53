"""The ledger: what one rank holds, computes and sends in an optimizer step (`replay/account.py` fills it)."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fivefold.ledger.setup import Figure, Number
from fivefold.ledger.work import Work

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv"]
Phase = Literal["forward", "backward", "optimizer"]
Role = Literal["weights", "gradients", "states"]


@dataclass(frozen=True)
class Held:
    """Bytes of one role that a rank holds.

    rest  after backward, before the optimizer's update: the moment when weights, gradients and
          optimizer states all exist
    peak  the most of it that is alive at any moment of the step
    on_host  it lies in the host's memory, whatever computes
    """

    role: Role
    what: str
    rest: int
    peak: int
    on_host: bool = False


@dataclass(frozen=True)
class Message:
    """A collective that a rank takes part in, `count` times in one optimizer step.

    Sizes and counts may be arrays over many layouts. A count below 1 is of what happens every few steps.

    payload  bytes of the whole tensor: what all-reduce sums, all-gather ends with, reduce-scatter
             starts from, this rank puts into an all-to-all, sends or receives
    group    the mesh axis (or axes, joined by `*`) along which the ranks are grouped
    hides_behind  the compute under which it runs ("forward", "backward": of other layers or micro-batches;
             "attention": of its own layer; "matmul": the products it is fused with; "steps": those
             after it; "orthogonalisation": of other matrices), or None when the step waits for it
    joins    such lines of all parts of a rank travel as one message (`joined`)
    leaves   of an all-to-all: nothing of the payload stays on this rank
    """

    operation: Operation
    payload: Number
    group: str
    ranks: Number
    count: Figure
    phase: Phase
    hides_behind: str | None = None
    joins: bool = False
    leaves: bool = False

    @property
    def wire_bytes(self) -> Figure:
        """Bytes one rank sends for one such message."""
        return wire_bytes(self.operation, self.with_own, self.ranks)

    @property
    def with_own(self) -> Figure:
        """The payload, with as much for this rank itself as there is for each other."""
        if not self.leaves:
            return self.payload
        return self.payload * self.ranks / np.maximum(self.ranks - 1, 1)


@dataclass(frozen=True)
class Ledger:
    """What one rank holds, computes and sends in one steady optimizer step."""

    held: tuple[Held, ...] = ()
    work: tuple[Work, ...] = ()
    messages: tuple[Message, ...] = ()

    def rest(self, role: Role) -> int:
        """On the device."""
        return sum(line.rest for line in self.held if line.role == role and not line.on_host)

    def peak(self, role: Role) -> int:
        """On the device."""
        return sum(line.peak for line in self.held if line.role == role and not line.on_host)

    @property
    def on_host(self) -> int:
        """Bytes of what was put into the host's memory."""
        return sum(line.peak for line in self.held if line.on_host)

    def traffic(self, steps: int = 1) -> Counter[tuple[str, int, str]]:
        """How many times each (operation, payload bytes, group) happens in a step, or in some steps."""
        counts: Counter[tuple[str, int, str]] = Counter()
        for line in self.messages:
            counts[line.operation, int(line.payload), line.group] += round(float(line.count) * steps)
        return counts

    @property
    def flops(self) -> Figure:
        """As a counter sees them: attention is a full square, masked or not."""
        return sum(line.flops * line.count for line in self.work)

    @property
    def wire_bytes(self) -> Figure:
        return sum(line.wire_bytes * line.count for line in self.messages)


def wire_bytes(operation: str, payload: Figure, ranks: Number) -> Figure:
    """Bytes one rank sends for a message, by the ring algorithm.

    (An all-to-all is taken as even; what is received from another rank is that rank's to count.)
    """
    if operation in ("send", "recv"):
        return payload if operation == "send" else 0.0
    share = payload * (ranks - 1) / ranks
    return 2 * share if operation == "all_reduce" else share


def sent(lines: Iterable[Message]) -> tuple[Message, ...]:
    """The messages that travel: none in groups of one rank, and none that happen no times."""
    counted = (replace(line, count=line.count * (1 * (line.ranks > 1))) for line in lines)
    return tuple(line for line in counted if np.any(line.count > 0))


def joined(lines: Iterable[Message]) -> list[Message]:
    """The same messages, those that join put together: one for each operation and group, with all bytes."""
    apart, together = [], dict[tuple[str, str], Message]()
    for line in lines:
        key = line.operation, line.group
        payload: Any = line.payload * line.count  # what joins has no fractions
        if line.joins:
            before = together[key].payload if key in together else 0
            together[key] = replace(line, payload=before + payload)
        else:
            apart.append(line)
    return [*apart, *(replace(line, count=1 * (line.payload > 0)) for line in together.values())]


def repeated(lines: Iterable[Message], times: Figure) -> Iterator[Message]:
    """The same messages, `times` as often."""
    return (replace(line, count=line.count * times) for line in lines)
