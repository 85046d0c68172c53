"""How long a step takes, played: of many layouts at once.

With a pipeline its computations are timed one by one (`pipelined.py`). Without one, the two streams of a rank
are followed through its micro-batches (`passes.py`). Then come the sums that wait for all gradients, and the
optimizer. Layouts that share an order are played together, whatever else they differ in.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from fivefold.ledger.setup import Figure
from fivefold.planner.play.arrays import from_table
from fivefold.planner.play.passes import Streams, step_passes
from fivefold.planner.play.pipelined import Pipelined, Stages, stages_of
from fivefold.planner.play.timed import NOTHING, SPAN, Array, Order, Timed, numbers_of, orders_of
from fivefold.planner.time.parts import Costs
from fivefold.schedules import schedule_named


def step_times(every: Sequence[Costs], known: Sequence[Array | None] | None = None) -> list[Array]:
    """Seconds of a step of each layout of each setup, [layouts].

    known  what their steps are put together from (`Timed.table`), where that is known
    """
    found = [np.zeros(len(numbers_of(costs)[0])) for costs in every]
    pairs = zip(every, known or [None] * len(every), strict=True)
    tables = [Timed.table(costs) if table is None else table for costs, table in pairs]
    together: dict[Order, list[tuple[int, Array]]] = defaultdict(list)
    for number, costs in enumerate(every):
        for order, rows in orders_of(costs).items():
            together[order].append((number, rows))
    for order, members in together.items():
        timed = from_table(NOTHING, np.concatenate([tables[number][rows] for number, rows in members]))
        ends = np.cumsum([len(rows) for _, rows in members])
        for (number, rows), part in zip(members, np.split(played(order, timed), ends[:-1]), strict=True):
            found[number][rows] = part
    return found


def played(order: Order, timed: Timed) -> Array:
    """Seconds of the step of each layout."""
    return np.asarray(timed.step(gradients_time(order, timed)))


def gradients_time(order: Order, timed: Timed) -> Figure:
    """From the start of a step until all gradients are reduced."""
    found, more = _gradients(order, timed), timed.micro_batches - order.played
    if np.any(more):
        rounds = SPAN if order.ranks > 1 else 1
        fewer = _gradients(order._replace(played=order.played - rounds * order.ranks), timed)
        # A round cannot be shorter than what the slowest rank computes in it.
        each = np.maximum((found - fewer) / rounds, order.ranks * slowest_rank(order, timed))
        found = found + more / order.ranks * each
    return found


def slowest_rank(order: Order, timed: Timed) -> Figure:
    """Seconds that it computes for one micro-batch."""
    stages = [sum(part.forward + part.backward for part in timed.parts(load)) for load in order.loads]
    ranks = [sum(stages[stage] for stage in order.stages(rank)) for rank in range(order.ranks)]
    return reduce(np.maximum, ranks)


def _gradients(order: Order, timed: Timed) -> Figure:
    """Of a step with as many micro-batches as are played."""
    if order.ranks == 1:
        parts = timed.parts(order.loads[0])
        streams = Streams(order.slowdown)
        streams.run(step_passes(parts, order.played))
        return streams.end + sum(part.unhidden for part in parts)
    stages = stages_of(order, timed)
    if schedule_named(order.schedule).memory_limit is None:
        return Pipelined(order, stages, timed.transfer).end
    # An order that is searched for is another one for each layout.
    transfer = np.atleast_1d(timed.transfer)
    alone = (slice(row, row + 1) for row in range(len(transfer)))
    return np.concatenate(
        [Pipelined(order, Stages(*(table[:, row] for table in stages)), transfer[row]).end for row in alone]
    )


# --- where the time goes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step of ONE layout.

    step_time  all of it: the sum of the others
    compute    of the slowest rank of the pipeline, for all its micro-batches
    bubble     in which ranks wait for each other's micro-batches
    optimizer  the update itself
    exposed    axis -> what its messages add
    """

    step_time: float
    compute: float
    bubble: float
    optimizer: float
    exposed: dict[str, float]


def breakdown(costs: Costs) -> Breakdown:
    """Where the time of a step goes: it is played again without some of its messages."""
    [order], timed = orders_of(costs), Timed.of(costs)
    count = float(timed.micro_batches)
    computing = timed.without_messages()
    steps = (timed, computing, computing._replace(transfer=0.0))
    total, sending, at_once = (float(np.squeeze(gradients_time(order, step))) for step in steps)
    busy, exposed = _busiest(order, costs)
    waits = {axis: count * seconds for axis, seconds in exposed.items()}
    step_time, optimizer = float(timed.step(total)), float(timed.optimizer)
    return Breakdown(
        step_time=step_time,
        compute=count * busy - sum(waits.values()),
        bubble=at_once - count * busy,
        optimizer=optimizer,
        exposed=waits | {"pp": sending - at_once, "dp": step_time - optimizer - sending},
    )


def _busiest(order: Order, costs: Costs) -> tuple[float, dict[str, float]]:
    """Seconds that the slowest rank computes for a micro-batch, and by axis those of messages in them."""
    ranks = [on_rank(order, rank) for rank in range(order.ranks)]
    parts = (costs.embedding, costs.block, costs.head)
    busy = [sum(n * float(part.total) for n, part in zip(counts, parts, strict=True)) for counts in ranks]
    slowest = ranks[int(np.argmax(busy))]
    return max(busy), exposed_on(slowest, costs)


def exposed_on(counts: tuple[int, int, int], costs: Costs) -> dict[str, float]:
    """By axis, seconds of a micro-batch in which a rank that holds so many parts waits for messages."""
    parts = (costs.embedding, costs.block, costs.head)
    axes = sorted({axis for part in parts for axis in part.exposed})
    return {
        axis: sum(n * float(part.exposed.get(axis, 0.0)) for n, part in zip(counts, parts, strict=True))
        for axis in axes
    }


def on_rank(order: Order, rank: int) -> tuple[int, int, int]:
    """How many embeddings, blocks and heads a rank of the pipeline holds."""
    mine = [order.loads[stage] for stage in order.stages(rank)]
    return tuple(sum(column) for column in zip(*((m.embedding, m.layers, m.head) for m in mine), strict=True))
