"""Replays a program on tensors that have a size and nothing else, as torch runs it: eagerly, with autograd.

A tensor's memory is there as long as something refers to it, here as in torch: a variable of the program, or
a node of the graph that saved it for backward. So a program that is written here line by line like the real
one has the same tensors alive at the same moments, and the tape reads off the most there ever was. Sizes may
be arrays over many layouts at once.

This leans on CPython: an object dies with the last reference to it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

from fivefold.ledger.setup import Number
from fivefold.replay.graph import (
    INPUT,
    WEIGHT,
    Backward,
    Gradients,
    Memory,
    Node,
    Segment,
    Storage,
    Tensor,
)


class _Enough(Exception):  # noqa: N818
    """Everything that was saved in a segment has been made again."""


class Tape(Memory):
    """Runs operations, records them and what they save, and goes back through them."""

    def __init__(self) -> None:
        super().__init__()
        self.segment: Segment | None = None  # that is being run
        self.wanted: list[bool] = []  # which arguments the operation being differentiated owes a gradient
        self._numbers = count()

    # --- tensors ---------------------------------------------------------------------------------------

    def empty(self, elements: Number, width: int) -> Tensor:
        """A new tensor of `elements` elements, `width` bytes each."""
        return Tensor(Storage(self, elements * width), elements, width)

    def like(self, x: Tensor) -> Tensor:
        """A new tensor of the same size."""
        return self.empty(x.elements, x.width)

    def parameter(self, elements: Number, width: int) -> Tensor:
        """A weight, whose own memory is counted elsewhere."""
        return Tensor(Storage(self, 0), elements, width, WEIGHT)

    # --- forward ---------------------------------------------------------------------------------------

    def record(
        self,
        result: Tensor,
        arguments: Sequence[Tensor | None],
        backward: Backward | None = None,
        saved: list[Tensor] | None = None,
        others: Sequence[Tensor] = (),
    ) -> Tensor:
        """Make `result` (and `others`) the outcome of an operation that backward goes back through.

        Without a `backward` of its own, each argument is given a new tensor as its gradient. `backward` must
        not refer to tensors that torch does not keep.
        """
        edges = [None if a is None else a.edge for a in arguments]
        if not any(edges):
            return result
        sizes = [None if a is None or a.edge is None else (a.elements, a.width) for a in arguments]

        def new_gradients(_: Tensor) -> Gradients:
            return [None if size is None else self.empty(*size) for size in sizes]

        node = Node(next(self._numbers), edges, backward or new_gradients, [])
        if saved is not None:
            node.saved, node.segment = saved, self.segment
        for index, one in enumerate([result, *others]):
            one.edge = node, index
        return result

    def save(self, *tensors: Tensor | None) -> list[Tensor]:
        """Keep tensors from forward to backward; in a segment that is run again, only then."""
        found, segment = [tensor.detached() for tensor in tensors if tensor is not None], self.segment
        if segment is None:
            return found
        if segment.made is None:
            segment.saved.append([])
            return segment.saved[-1]
        promised = segment.saved[segment.made]
        promised += found
        segment.made += 1
        if segment.made == len(segment.saved):
            raise _Enough
        return promised

    # --- recomputation ---------------------------------------------------------------------------------

    def checkpoint(self, run: Callable[[Tensor], Tensor], x: Tensor, selective: bool = False) -> Tensor:
        """`run(x)`, of which backward gets what it needs by running it again."""
        self.segment = Segment(lambda: run(x), selective)
        result = run(x)
        self.segment = None
        return result

    def _run_again(self, segment: Segment) -> None:
        self.segment, segment.made = segment, 0
        with suppress(_Enough):
            segment.again()
        self.segment, segment.made = None, None

    def costly(self, elements: Number, width: int) -> Tensor:
        """As `empty`, for the result of an operation that selective recomputation does not repeat."""
        if self.kept is not None:
            return self.kept.pop(0)
        result = self.empty(elements, width)
        self.keep(result)
        return result

    @property
    def kept(self) -> list[Tensor] | None:
        """Results of costly operations that are there already: when what was forgotten is made again."""
        running = self.segment
        return running.kept if running and running.selective and running.made is not None else None

    def keep(self, *results: Tensor) -> None:
        """Under selective recomputation, hold on to these results of a costly operation."""
        if self.segment is not None and self.segment.selective:
            self.segment.kept += [result.detached() for result in results]

    # --- backward --------------------------------------------------------------------------------------

    def backward(self, start: Tensor, halfway: bool = False) -> list[Tensor]:
        """Run the graph behind `start` backward, latest operation first, as torch's engine does.

        halfway  only as far as the input: what was saved stays. Returned are the gradients that weights wait
                 for.
        """
        assert start.edge is not None
        node, index = start.edge
        nodes = _latest_first(node)
        left_out = _beside_the_input(nodes) if halfway else set()
        waiting: list[Tensor] = []
        gradients: dict[Node, dict[int, Tensor]] = defaultdict(dict)
        gradients[node][index] = self.like(start)
        for node in nodes:
            if node not in gradients:
                continue
            of_results = gradients.pop(node)
            if node.segment is not None and not node.saved:
                self._run_again(node.segment)
            self.wanted = [edge is not None and edge[0] not in left_out for edge in node.edges]
            found = node.backward(of_results[0])
            if not halfway:
                node.saved.clear()
                node.segment = None
            elif any(edge is not None and edge[0] in left_out for edge in node.edges):
                waiting += of_results.values()
            del of_results
            for edge, wanted in zip(node.edges, self.wanted, strict=True):
                gradient = found.pop(0)
                if edge is None or gradient is None or edge is INPUT or not wanted:
                    continue
                if edge is WEIGHT:
                    self.complete = self.complete + gradient.size
                    continue
                target, index = edge
                # Added up in a new tensor. (Torch may add in place; under a tracer it does not.)
                added = index in gradients[target]
                gradients[target][index] = self.like(gradient) if added else gradient
            del gradient
        return waiting


def _latest_first(start: Node) -> list[Node]:
    """The nodes behind `start`, itself included. A node's edges go to earlier ones."""
    found, unseen = {start}, [start]
    while unseen:
        new = {edge[0] for edge in unseen.pop().edges if edge is not None} - found
        found |= new
        unseen += new
    return sorted(found, key=lambda node: node.number, reverse=True)


def _beside_the_input(latest_first: list[Node]) -> set[Node]:
    """The nodes from which no way leads to the input."""
    found = {WEIGHT[0]}
    for node in reversed(latest_first):
        if node is not INPUT[0] and all(edge is None or edge[0] in found for edge in node.edges):
            found.add(node)
    return found
