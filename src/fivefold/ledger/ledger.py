"""The ledger: one rank's picture of one optimizer step.

Every part of the system that changes what a rank holds or sends adds its lines here, in the order in
which it changes the program. Nothing else in fivefold has formulas of its own: memory tables, traffic
tables and checks all read these lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv"]
Phase = Literal["forward", "backward", "optimizer"]
Role = Literal["weights", "gradients", "states"]


@dataclass(frozen=True)
class Held:
    """Bytes of one role that a rank holds.

    rest  after backward, before the optimizer's update: the moment when weights, gradients and
          optimizer states all exist
    peak  the most of it that is alive at any moment of the step
    """

    role: Role
    what: str
    rest: int
    peak: int


@dataclass(frozen=True)
class Message:
    """A collective that a rank takes part in, `count` times in one optimizer step.

    payload  bytes of the whole tensor: what all-reduce sums, all-gather ends with, reduce-scatter
             starts from, this rank puts into an all-to-all, sends or receives. Bytes on the
             wire follow from it (`wire_bytes`).
    group    the mesh axis (or axes, joined by `*`) along which the ranks are grouped
    hides_behind  the compute under which it runs, or None when the step waits for it
    """

    operation: Operation
    payload: int
    group: str
    ranks: int
    count: int
    phase: Phase
    hides_behind: str | None = None

    @property
    def wire_bytes(self) -> float:
        """Bytes one rank sends for one such message, by the ring algorithm.

        (An all-to-all is taken as even; what is received from another rank is that rank's to count.)
        """
        if self.operation in ("send", "recv"):
            return self.payload if self.operation == "send" else 0.0
        share = self.payload * (self.ranks - 1) / self.ranks
        return 2 * share if self.operation == "all_reduce" else share


@dataclass(frozen=True)
class Ledger:
    """What one rank holds and sends in one steady optimizer step."""

    held: tuple[Held, ...] = ()
    messages: tuple[Message, ...] = ()

    def hold(self, *lines: Held) -> Ledger:
        return replace(self, held=self.held + lines)

    def send(self, *lines: Message) -> Ledger:
        """Add messages; groups of one rank send nothing and are left out."""
        sent = tuple(line for line in lines if line.ranks > 1 and line.count > 0)
        return replace(self, messages=self.messages + sent)

    def rest(self, role: Role) -> int:
        return sum(line.rest for line in self.held if line.role == role)

    def peak(self, role: Role) -> int:
        return sum(line.peak for line in self.held if line.role == role)

    def traffic(self) -> Counter[tuple[str, int, str]]:
        """How many times each (operation, payload bytes, group) happens in a step."""
        return tally((line.operation, line.payload, line.group, line.count) for line in self.messages)

    @property
    def wire_bytes(self) -> float:
        return sum(line.wire_bytes * line.count for line in self.messages)


def tally(lines: Iterable[tuple[str, int, str, int]]) -> Counter[tuple[str, int, str]]:
    """Sum counts of equal (operation, payload, group)."""
    counts: Counter[tuple[str, int, str]] = Counter()
    for operation, payload, group, count in lines:
        counts[operation, payload, group] += count
    return counts
