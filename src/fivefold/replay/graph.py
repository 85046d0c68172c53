"""Tensors that have a size and nothing else, and the graph of operations that autograd goes back through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fivefold.ledger.setup import Figure, Number


class Memory:
    """Bytes that are alive now, and the most that ever were.

    complete  gradients of weights that have come, which are no longer counted among what is alive
    """

    def __init__(self) -> None:
        self.now: Figure = 0
        self.peak: Figure = 0
        self.complete: Figure = 0
        self.peak_complete: Figure = 0

    def holds(self, change: Figure) -> None:
        """The bytes alive grow by `change`."""
        self.now = self.now + change
        self.peak = np.maximum(self.peak, self.now)
        self.peak_complete = np.maximum(self.peak_complete, self.now + self.complete)


class Storage:
    """A piece of memory: alive as long as this object is."""

    __slots__ = ("memory", "size")

    def __init__(self, memory: Memory, size: Number):
        self.memory, self.size = memory, size
        memory.holds(size)

    def __del__(self) -> None:
        self.memory.now = self.memory.now - self.size


@dataclass(eq=False, slots=True)
class Tensor:
    """A view into a storage: `elements` of `width` bytes each. `edge`: where its gradient goes, if any."""

    storage: Storage
    elements: Number
    width: int
    edge: Edge | None = None

    @property
    def size(self) -> Number:
        return self.elements * self.width

    def detached(self) -> Tensor:
        """The same memory without its history."""
        return Tensor(self.storage, self.elements, self.width)


@dataclass(eq=False)
class Segment:
    """A part of the program that backward runs forward again, when it first needs what was saved in it.

    selective  whether results of costly operations are kept, and not computed again
    saved      a list for each time that something is saved: empty until it is made again
    made       how many of these are filled while it is run again, otherwise None
    """

    again: Callable[[], Any]
    selective: bool
    kept: list[Tensor] = field(default_factory=list)
    saved: list[list[Tensor]] = field(default_factory=list)
    made: int | None = None


Gradients = list[Tensor | None]
"""Of the arguments of an operation."""
Backward = Callable[[Tensor], Gradients]
"""Of one operation: the gradient of its (first) result -> the gradients of its arguments."""


@dataclass(eq=False, slots=True)
class Node:
    """One operation to be differentiated. `segment`: where what it saved is made again."""

    number: int
    edges: list[Edge | None]
    backward: Backward
    saved: list[Tensor]
    segment: Segment | None = None


Edge = tuple[Node, int]
"""To which node a gradient goes, and as which of its results'."""


def _nothing(gradient: Tensor) -> Gradients:
    return []


WEIGHT: Edge = Node(-1, [], _nothing, []), 0
"""Where all gradients of weights go."""
INPUT: Edge = Node(-1, [], _nothing, []), 0
"""Where the gradient goes of what the program is given."""
