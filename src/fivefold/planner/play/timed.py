"""What a step is put together from, and which layouts are played together: those that share an order."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.axes.outer import hidden_share
from fivefold.ledger.setup import Figure, Number
from fivefold.planner.placement import Load
from fivefold.planner.play.arrays import table
from fivefold.planner.play.passes import Part, Sent, parts_of
from fivefold.planner.time.parts import Costs
from fivefold.planner.time.state import optimizer_time
from fivefold.schedules import schedule_named

Array = npt.NDArray[Any]
SEEN = 4
"""Without a pipeline each micro-batch after so many takes as long as the one before."""
LONG = 65_536
"""Of a pipeline's step with more computations than these only some rounds of micro-batches are played."""
ROUNDS, SPAN = 13, 6
"""Rounds of one micro-batch a rank that are played of a long step. Ranks may wait for each other in a rhythm
of their own, so each further round is as long as the last ones are on average: so many of them."""


class Order(NamedTuple):
    """What layouts that are played together have in common.

    played  micro-batches; of a layout with more, the rest follows from the last of them
    loads   what each stage holds
    """

    schedule: str
    ranks: int
    virtual_stages: int
    played: int
    loads: tuple[Load, ...]
    slowdown: float

    def stages(self, rank: int) -> list[int]:
        """The stages of a rank."""
        if self.ranks == 1:
            return [0]
        return schedule_named(self.schedule).stages_of(rank, self.ranks, self.virtual_stages)


class Timed(NamedTuple):
    """Seconds that the steps of layouts with one order are made of: figures, or arrays over layouts.

    transfer   of a micro-batch's activations between stages
    late       sums that wait for all gradients
    travelling averages of weights that are on their way while steps go on, `hidden` of the time at the most
    at_once    gradients are reduced as soon as they are there, not when a stage is through with them all
    """

    micro_batches: Figure
    embedding: Part
    block: Part
    head: Part
    transfer: Figure
    late: Figure
    travelling: Figure
    hidden: Figure
    optimizer: Figure
    at_once: bool | Array

    @classmethod
    def of(cls, costs: Costs) -> Timed:
        embedding, block, head = parts_of(costs)
        return cls(
            costs.setup.micro_batches,
            embedding,
            block,
            head,
            costs.transfer,
            late=costs.late,
            travelling=costs.travelling,
            hidden=hidden_share(costs.setup),
            optimizer=optimizer_time(costs),
            at_once=costs.setup.zero == 0 or not costs.ours,
        )

    @classmethod
    def table(cls, costs: Costs) -> Array:
        """[layouts, figures] of all of them."""
        return table(cls.of(costs), len(numbers_of(costs)[0]))

    def without_messages(self) -> Timed:
        """The same step if the data axis sent nothing."""
        embedding, block, head = (
            part._replace(gathers=NOT_SENT, gathers_again=NOT_SENT, reductions=NOT_SENT, unhidden=0.0)
            for part in (self.embedding, self.block, self.head)
        )
        return self._replace(embedding=embedding, block=block, head=head, late=0.0, travelling=0.0)

    def step(self, gradients: Figure) -> Figure:
        """Seconds of the whole step, of which it takes `gradients` until all of them are reduced."""
        found = gradients + self.late + self.optimizer
        return found + np.maximum(0.0, self.travelling - self.hidden * found)

    def parts(self, load: Load) -> list[Part]:
        """What a stage holds, in forward order."""
        return [self.embedding] * load.embedding + [self.block] * load.layers + [self.head] * load.head


NOT_SENT = Sent(0.0, 0.0)
NO_PART = Part(0.0, 0.0, 0.0, NOT_SENT, NOT_SENT, NOT_SENT, 0.0)
NOTHING = Timed(0.0, NO_PART, NO_PART, NO_PART, 0.0, 0.0, 0.0, 0.0, 0.0, at_once=False)


def orders_of(costs: Costs) -> dict[Order, Array]:
    """Order -> which layouts of a setup have it."""
    columns = (column.tolist() for column in numbers_of(costs))
    found: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for row, numbers in enumerate(zip(*columns, strict=True)):
        found[_played(costs, *numbers)].append(row)
    return {order_of(costs, *numbers): np.array(rows) for numbers, rows in found.items()}


def numbers_of(costs: Costs) -> list[Array]:
    """Ranks of the pipeline, stages on each, and micro-batches: [layouts] of each."""
    setup = costs.setup
    numbers: tuple[Number, ...] = (setup.pp, setup.virtual_stages, setup.micro_batches)
    return list(np.broadcast_arrays(*map(np.atleast_1d, numbers)))


def order_of(costs: Costs, pp: int, virtual: int, count: int) -> Order:
    loads = tuple(costs.stack.cut(costs.setup, pp * virtual))
    return Order(costs.setup.schedule if pp > 1 else "", pp, virtual, count, loads, costs.slowdown)


def _played(costs: Costs, pp: int, virtual: int, count: int) -> tuple[int, int, int]:
    """The same numbers, with the micro-batches that are played."""
    if pp == 1:
        return 1, 1, min(count, SEEN)
    row, some = costs.setup.pipeline, ROUNDS * pp + count % pp
    if 2 * pp * virtual * count <= LONG or count <= some or row.order is None or row.forwards_first:
        return pp, virtual, count
    return pp, virtual, some if row.allows(pp, some - SPAN * pp) and row.allows(pp, some) else count
