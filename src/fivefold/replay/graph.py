"""Tensors that have a size and nothing else, and the graph of operations that autograd goes back through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fivefold.ledger.setup import Number
from fivefold.replay.segments import Saved

if TYPE_CHECKING:
    from fivefold.replay.tape import Tape


class Storage:
    """Memory of a tape: alive as long as this object is."""

    __slots__ = ("size", "tape")

    def __init__(self, tape: Tape, size: Number):
        self.tape, self.size = tape, size
        tape.holds(size)

    def __del__(self) -> None:
        self.tape.now = self.tape.now - self.size


@dataclass(eq=False, slots=True)
class Tensor:
    """A view into a storage: `elements` of `width` bytes each. `node` made it, as its result `index`."""

    storage: Storage
    elements: Number
    width: int
    node: Node | None = None
    index: int = 0
    needs_gradient: bool = False

    def detached(self) -> Tensor:
        """The same memory without its history."""
        return Tensor(self.storage, self.elements, self.width)


Gradients = list[Tensor | None]
"""Of the results of an operation, or of its arguments."""
Backward = Callable[[list[Tensor], Saved], Gradients]
"""Of one operation: the gradients of its results and what was saved -> the gradients of its arguments."""
Arrived = Callable[[list[Any]], None]
"""Takes a weight's gradient out of the list it is handed in, which was the last to hold it."""


@dataclass(eq=False, slots=True)
class Node:
    """One operation to be differentiated, or (with `arrived`) the place where a weight's gradient arrives."""

    number: int
    edges: list[Edge | None]
    backward: Backward | None
    results: int = 1
    saved: Saved = field(default_factory=lambda: Saved([]))
    arrived: Arrived | None = None

    def __lt__(self, other: Node) -> bool:
        """The latest operation first; gradients of weights are taken away as soon as they are there."""
        return (self.backward is None, self.number) > (other.backward is None, other.number)

    def run(self, gradients: Gradients, release: bool = True) -> Gradients:
        """Gradients of the results -> of the arguments; then forget what was saved."""
        if self.backward is None:
            assert self.arrived is not None
            self.arrived(gradients)
            return []
        found = self.backward(gradients, self.saved)  # type: ignore[arg-type]
        if release:
            self.saved = Saved([])
        return found


Edge = tuple[Node, int]
"""To which node a gradient goes, and as which of its results'."""
