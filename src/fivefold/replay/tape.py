"""Replays a program on tensors that have a size and nothing else, as torch runs it: eagerly, with autograd.

A tensor's memory is there as long as something refers to it, here as in torch: a variable of the program, or
a node of the graph that saved it for backward. (A `Storage` tells the tape when it dies.) So a program that
is written here line by line like the real one has the same tensors alive at the same moments, and the tape
reads off the most there ever was. Sizes may be arrays over many layouts at once.

This leans on CPython: an object dies with the last reference to it.
"""

from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from fivefold.ledger.setup import Figure, Number
from fivefold.replay import backward as passes
from fivefold.replay.graph import Arrived, Backward, Gradients, Node, Storage, Tensor
from fivefold.replay.segments import Frame, Saved


class Tape:
    """What is alive now, in bytes, and the most that ever was."""

    backward = passes.backward
    backward_input = passes.backward_input
    backward_weights = passes.backward_weights

    def __init__(self) -> None:
        self.now: Figure = 0
        self.peak: Figure = 0
        self.complete: Figure = 0
        self.peak_complete: Figure = 0
        self.frames: list[Frame] = []
        self.wanted: list[bool] = []  # which arguments the operation being differentiated owes a gradient
        self._numbers = count()

    def empty(self, elements: Number, width: int, needs_gradient: bool = False) -> Tensor:
        """A new tensor of `elements` elements, `width` bytes each."""
        return Tensor(Storage(self, elements * width), elements, width, needs_gradient=needs_gradient)

    def like(self, x: Tensor) -> Tensor:
        """A new tensor of the same size."""
        return self.empty(x.elements, x.width)

    def costly(self, elements: Number, width: int) -> Tensor:
        """As `empty`, for the result of an operation that selective recomputation does not repeat."""
        if self.has_kept:
            return self.frames[-1].kept.pop(0)
        result = self.empty(elements, width)
        self.keep(result)
        return result

    @property
    def has_kept(self) -> bool:
        """Whether results of costly operations are there already: when what was forgotten is made again."""
        return bool(self.frames) and self.frames[-1].selective and self.frames[-1].made >= 0

    def keep(self, *results: Tensor) -> None:
        """Under selective recomputation, hold on to these results of a costly operation."""
        if self.frames and self.frames[-1].selective:
            self.frames[-1].kept += [result.detached() for result in results]

    def checkpoint(self, run: Callable[[Tensor], Tensor], x: Tensor, selective: bool = False) -> Tensor:
        """`run(x)`, of which backward gets what it needs by running it again."""
        frame = Frame(self, lambda: run(x), selective)
        self.frames.append(frame)
        result = run(x)
        self.frames.pop()
        return result

    def parameter(self, elements: Number, width: int) -> Tensor:
        """A weight, whose own memory is counted elsewhere."""
        return self.leaf(Tensor(Storage(self, 0), elements, width), self._complete)

    def _complete(self, found: list[Tensor]) -> None:
        """A gradient is complete, and no longer counted among what is alive."""
        gradient = found.pop()
        self.complete = self.complete + gradient.elements * gradient.width

    def leaf(self, x: Tensor, arrived: Arrived) -> Tensor:
        """The same memory as something to differentiate by; `arrived` is called with its gradient."""
        result = x.detached()
        result.needs_gradient = True
        result.node = Node(next(self._numbers), [], None, arrived=arrived)
        return result

    def holds(self, change: Figure) -> None:
        """The bytes alive grow by `change`."""
        self.now = self.now + change
        self.peak = np.maximum(self.peak, self.now)
        self.peak_complete = np.maximum(self.peak_complete, self.now + self.complete)

    def record(
        self,
        result: Tensor,
        arguments: Sequence[Tensor | None],
        backward: Backward | None = None,
        saved: Saved | None = None,
        others: Sequence[Tensor] = (),
    ) -> Tensor:
        """Make `result` (and `others`) the outcome of an operation that backward goes back through.

        Without a `backward` of its own, each argument is given a new tensor as its gradient.
        """
        wanted = [a if a is not None and a.needs_gradient else None for a in arguments]
        if not any(wanted):
            return result
        sizes = [None if a is None else (a.elements, a.width) for a in wanted]

        def new_gradients(g: list[Tensor], saved: Saved) -> Gradients:
            saved.fetch()
            return [None if size is None else self.empty(*size) for size in sizes]

        edges = [None if a is None or a.node is None else (a.node, a.index) for a in wanted]
        results = [result, *others]
        node = Node(next(self._numbers), edges, backward or new_gradients, len(results), saved or Saved([]))
        for index, one in enumerate(results):
            one.node, one.index, one.needs_gradient = node, index, True
        return result

    def save(self, *tensors: Tensor | None) -> Saved:
        """Keep tensors from forward to backward; inside a recomputed segment, only promise them."""
        if self.frames:
            return self.frames[-1].save(list(tensors))
        return Saved([None if tensor is None else tensor.detached() for tensor in tensors])
