"""Tensors that have a size and nothing else, and the graph of operations that autograd goes back through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

    @property
    def edge(self) -> Edge | None:
        return None if self.node is None else (self.node, self.index)

    def detached(self) -> Tensor:
        """The same memory without its history."""
        return Tensor(self.storage, self.elements, self.width)


Backward = Callable[[list[Tensor], Saved], list[Tensor | None]]
"""Of one operation: the gradients of its results and what was saved -> the gradients of its arguments."""
Arrived = Callable[[list[Any]], None]
"""Takes a weight's gradient out of the list it is handed in, which was the last to hold it."""


class Node:
    """One operation to be differentiated, or (with `arrived`) the place where a weight's gradient arrives."""

    __slots__ = ("arrived", "backward", "edges", "number", "priority", "results", "saved")

    def __init__(
        self,
        tape: Tape,
        edges: list[Edge | None],
        backward: Backward | None,
        results: int,
        saved: Saved | None = None,
        arrived: Arrived | None = None,
    ):
        self.edges, self.backward, self.arrived = edges, backward, arrived
        self.results = results
        self.saved = saved or Saved([])
        self.number = tape.number_node()
        # The latest operation first; gradients of weights are taken away as soon as they are there.
        self.priority = -float("inf") if backward is None else -float(self.number)

    def __lt__(self, other: Node) -> bool:
        return self.number > other.number

    def run(self, gradients: list[Tensor | None], release: bool = True) -> list[Tensor | None]:
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
