"""Backward passes over a graph, latest operation first, as torch's engine runs them: whole, or in halves."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from fivefold.replay.graph import Edge, Gradients, Node, Tensor

if TYPE_CHECKING:
    from fivefold.replay.tape import Tape


@dataclass(eq=False)
class Halfway:
    """A backward pass that has computed the gradient of its input, and not yet those of weights.

    leading  the nodes on the way from the start to the input
    arrived  of these, the ones that weights branch off from, with the gradients of their results
    """

    start: Tensor
    leading: set[Node]
    arrived: dict[Node, Gradients] = field(default_factory=dict)


def backward(tape: Tape, start: Tensor, gradient: Tensor) -> None:
    """Run the graph behind `start` backward, latest operation first, as torch's engine does."""
    buffers = _first_buffer(start, gradient)
    del gradient  # held by the engine alone
    _run_graph(tape, buffers, lambda edge: True, Node.run)


def backward_input(tape: Tape, start: Tensor, gradient: Tensor, x: Tensor) -> Halfway:
    """Backward as far as `x` only: what weights need is kept, and so is the graph."""
    buffers = _first_buffer(start, gradient)
    del gradient
    assert x.node is not None
    leading = _leading_to(next(iter(buffers)), x.node)
    halfway = Halfway(start, leading)

    def run(node: Node, gradients: Gradients) -> Gradients:
        if node.backward is not None and any(e is not None and e[0] not in leading for e in node.edges):
            halfway.arrived[node] = list(gradients)
        return node.run(gradients, release=False)

    _run_graph(tape, buffers, lambda edge: edge[0] in leading, run)
    return halfway


def backward_weights(tape: Tape, halfway: Halfway) -> None:
    """The other half: from where weights branch off the way to the input."""
    run = partial(Node.run, release=False)
    for node, gradients in halfway.arrived.items():
        _run_graph(tape, {node: list(gradients)}, lambda edge: edge[0] not in halfway.leading, run)


def _first_buffer(start: Tensor, gradient: Tensor) -> dict[Node, Gradients]:
    assert start.node is not None
    return {start.node: [gradient if index == start.index else None for index in range(start.node.results)]}


def _run_graph(
    tape: Tape,
    buffers: dict[Node, Gradients],
    follows: Callable[[Edge], bool],
    run: Callable[[Node, Gradients], Gradients],
) -> None:
    """From the one node whose results' gradients are in `buffers`."""
    ready = list(buffers)
    waits = _dependencies(ready[0], follows)
    while ready:
        node = heapq.heappop(ready)
        tape.wanted = [edge is not None and follows(edge) for edge in node.edges]
        found = run(node, buffers.pop(node))
        found.reverse()
        for edge in node.edges:
            gradient = found.pop()
            if edge is None or not follows(edge):
                continue
            target, index = edge
            if gradient is not None:
                buffer = buffers.setdefault(target, [None] * target.results)
                # Added up in a new tensor. (Torch may add in place; under a tracer it does not.)
                buffer[index] = gradient if buffer[index] is None else tape.like(gradient)
            gradient = None
            waits[target] -= 1
            if waits[target] == 0 and target in buffers:
                heapq.heappush(ready, target)
        gradient = None


def _dependencies(start: Node, follows: Callable[[Edge], bool]) -> dict[Node, int]:
    """How many results of later operations each node waits for."""
    counts: dict[Node, int] = {start: 0}
    unseen = [start]
    while unseen:
        for edge in unseen.pop().edges:
            if edge is None or not follows(edge):
                continue
            if edge[0] not in counts:
                counts[edge[0]] = 0
                unseen.append(edge[0])
            counts[edge[0]] += 1
    return counts


def _leading_to(start: Node, end: Node) -> set[Node]:
    """The nodes from which a way leads to `end`. (A node's edges go to nodes with lower numbers.)"""
    found = {end}
    for node in sorted(_dependencies(start, lambda edge: True), key=lambda node: node.number):
        if any(edge is not None and edge[0] in found for edge in node.edges):
            found.add(node)
    return found
