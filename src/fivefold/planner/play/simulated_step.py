"""A job's step on a cluster, simulated: every rank of its pipeline, or one rank block by block without one.

Stage and block times come from the time model, bytes from the ledger. All times are in seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.axes.layout import Place
from fivefold.axes.pieces import Part
from fivefold.config import Job
from fivefold.hardware.cluster import Cluster
from fivefold.ledger.ledger import Role
from fivefold.ledger.setup import Setup
from fivefold.planner.memory.known_activations import activations
from fivefold.planner.play.passes import Streams, step_passes
from fivefold.planner.play.pipelined import Pipelined, stages_of
from fivefold.planner.play.step_time import Breakdown, breakdown
from fivefold.planner.play.timed import Order, Timed, numbers_of, order_of
from fivefold.planner.play.timeline import Curve, Event, kept, timeline
from fivefold.planner.time.parts import Costs
from fivefold.replay.account import account
from fivefold.replay.activations import DEVICE

ROLES: tuple[Role, ...] = ("weights", "gradients", "states")
SENT = ("gather", "reduce")


@dataclass(frozen=True)
class SimulatedStep:
    """One step of a job.

    rows       what happens, by row: the ranks of the pipeline; without one, a rank's compute and its messages
    took       where its time goes
    bubble     the part of the pipeline's time in which its ranks wait for each other, on average
    in_flight  the most micro-batches that each rank of the pipeline keeps
    memory     for each rank of the pipeline its bytes over time: weights, gradients and states at their most,
               and the activations that are kept for backward. What a layer needs while it computes is not in.
    """

    rows: dict[str, list[Event]]
    took: Breakdown
    bubble: float
    in_flight: list[float]
    memory: dict[str, Curve]


def simulated(job: Job, cluster: Cluster) -> SimulatedStep:
    """Play one step of a resolved job, all of its micro-batches."""
    costs = Costs.of(Setup.of(job), cluster)
    order = order_of(costs, *(int(number[0]) for number in numbers_of(costs)))
    return _piped(job, costs, order) if order.ranks > 1 else _without_pipeline(job, costs, order)


def _piped(job: Job, costs: Costs, order: Order) -> SimulatedStep:
    timed = Timed.of(costs)
    played = Pipelined(order, stages_of(order, timed), timed.transfer)
    computed = timeline(played.computations, played.durations)
    block, embedding, head = _saved(costs.setup)
    saved = [load.layers * block + load.embedding * embedding + load.head * head for load in order.loads]
    end = float(played.end[0])
    return SimulatedStep(
        rows={
            f"rank {rank}": [*row, *_reductions(played, rank), *_ending(rank, end, timed)]
            for rank, row in enumerate(computed.rows)
        },
        took=breakdown(costs),
        bubble=computed.bubble,
        in_flight=computed.peak_in_flight,
        memory={
            f"rank {rank}": kept(row, saved.__getitem__, _held(job, rank))
            for rank, row in enumerate(computed.rows)
        },
    )


def _reductions(played: Pipelined, rank: int) -> Iterator[Event]:
    """Of the gradients of a rank's stages, what is still under way when it has computed everything."""
    computed = float(played.ends[played.computations.rows[rank][-1]][0])
    for one in played.reductions[rank]:
        start, end = max(computed, float(one.start[0])), float(one.end[0])
        if end > start:
            yield Event(rank, "reduce", one.stage, -1, start, end)


def _ending(rank: int, start: float, timed: Timed) -> Iterator[Event]:
    """What comes when all gradients are there: sums that wait for them, the update, the wait for averages."""
    updating = start + float(timed.late)
    updated, end = updating + float(timed.optimizer), float(timed.step(start))
    if updating > start:
        yield Event(rank, "exposed", -1, -1, start, updating)
    yield Event(rank, "optimizer", -1, -1, updating, updated)
    if end > updated:
        yield Event(rank, "exposed", -1, -1, updated, end)


def _without_pipeline(job: Job, costs: Costs, order: Order) -> SimulatedStep:
    timed, events = Timed.of(costs), list[Event]()
    streams = Streams(order.slowdown, events)
    streams.run(step_passes(timed.parts(order.loads[0]), order.played))
    compute = [event for event in events if event.kind not in SENT]
    rows = {
        "compute": [*compute, *_ending(0, float(streams.end), timed)],
        "messages": [event for event in events if event.kind in SENT],
    }
    block, embedding, head = _saved(costs.setup)
    saved = [embedding, *[block] * costs.setup.spec.layers, head]
    return SimulatedStep(
        rows={name: row for name, row in rows.items() if row},
        took=breakdown(costs),
        bubble=0.0,
        in_flight=[1.0],
        memory={"memory": kept(compute, saved.__getitem__, _held(job, 0))},
    )


def _saved(setup: Setup) -> Iterator[float]:
    """Bytes that a block, the embedding and the head keep for backward, of one micro-batch."""
    parts: tuple[Part, ...] = ("block", "embedding", "head")
    return (float(activations(part, setup, DEVICE).saved) for part in parts)


def _held(job: Job, rank: int) -> int:
    """Bytes of weights, gradients and states of a rank of the pipeline, each at its most."""
    ledger = account(job, Place(pp=rank))
    return sum(ledger.peak(role) for role in ROLES)
