"""A job's step on a cluster, simulated: every rank of its pipeline, or one rank block by block without one.

Stage and block times come from the time model, bytes from the ledger. All times are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.axes.layout import Place
from fivefold.config import Job
from fivefold.hardware.cluster import Cluster
from fivefold.ledger.ledger import Role
from fivefold.ledger.setup import Setup
from fivefold.planner.placement import ours
from fivefold.planner.play.any_schedule import played
from fivefold.planner.play.blocks import play_blocks
from fivefold.planner.play.one_layout import durations, pipeline
from fivefold.planner.play.timeline import Curve, Event, kept
from fivefold.planner.time.estimate import estimated, optimizer_time, state_time
from fivefold.planner.time.parts import Costs
from fivefold.replay.account import account
from fivefold.replay.activations import block_activations, embedding_activations, head_activations

ROLES: tuple[Role, ...] = ("weights", "gradients", "states")


@dataclass(frozen=True)
class SimulatedStep:
    """One step of a job.

    rows       what happens, by row: the ranks of the pipeline; without one, a rank's compute and its messages
    step_time  with the data axis' exposed messages and the optimizer
    bubble     the part of the pipeline's time in which its ranks wait for each other, on average
    exposed    axis -> seconds of the step in which only its messages run
    in_flight  the most micro-batches that each rank of the pipeline keeps
    memory     for each rank of the pipeline its bytes over time: weights, gradients and states at their most,
               and the activations that are kept for backward. What a layer needs while it computes is not in.
    """

    rows: dict[str, list[Event]]
    step_time: float
    bubble: float
    optimizer: float
    exposed: dict[str, float]
    in_flight: list[float]
    memory: dict[str, Curve]


def simulated(job: Job, cluster: Cluster) -> SimulatedStep:
    """Play one step of a resolved job."""
    costs = Costs.of(Setup.of(job), cluster)
    return _piped(job, costs) if job.layout.pp > 1 else _without_pipeline(job, costs)


def _piped(job: Job, costs: Costs) -> SimulatedStep:
    setup, took = costs.setup, durations(costs)
    timeline = played(*pipeline(setup), took)
    without_messages = played(*pipeline(setup), replace(took, transfer=0.0))
    data, optimizer = float(state_time(costs)), float(optimizer_time(costs))
    block, embedding, head = _saved(setup)
    stages = ours(setup, int(setup.stages))
    saved = [s.layers * block + s.embedding * embedding + s.head * head for s in stages]
    return SimulatedStep(
        rows={
            f"rank {rank}": [*row, *_ending(rank, timeline.makespan, data, optimizer)]
            for rank, row in enumerate(timeline.rows)
        },
        step_time=timeline.makespan + data + optimizer,
        bubble=timeline.bubble,
        optimizer=optimizer,
        exposed=_exposed(costs) | {"pp": timeline.makespan - without_messages.makespan, "dp": data},
        in_flight=timeline.peak_in_flight,
        memory={
            f"rank {rank}": kept(row, saved.__getitem__, _held(job, rank))
            for rank, row in enumerate(timeline.rows)
        },
    )


def _ending(rank: int, start: float, data: float, optimizer: float) -> Iterator[Event]:
    """What is put behind the passes: the data axis' messages that no compute hides, and the update."""
    if data > 0:
        yield Event(rank, "exposed", -1, -1, start, start + data)
    yield Event(rank, "optimizer", -1, -1, start + data, start + data + optimizer)


def _without_pipeline(job: Job, costs: Costs) -> SimulatedStep:
    setup = costs.setup
    streams = play_blocks(costs, int(setup.micro_batches))
    end, summed = streams.end, streams.end + streams.late
    rows = {
        "compute": [*streams.compute, Event(0, "optimizer", -1, -1, summed, summed + streams.optimizer)],
        "messages": list(streams.messages),
    }
    if streams.late > 0:
        rows["messages"].append(Event(0, "reduce", -1, -1, end, summed))
    block, embedding, head = _saved(setup)
    saved = [embedding, *[block] * setup.spec.layers, head]
    return SimulatedStep(
        rows={name: row for name, row in rows.items() if row},
        step_time=streams.step_time,
        bubble=0.0,
        optimizer=streams.optimizer,
        exposed=_exposed(costs) | {"pp": 0.0, "dp": streams.exposed},
        in_flight=[1.0],
        memory={"memory": kept(streams.compute, saved.__getitem__, _held(job, 0))},
    )


def _exposed(costs: Costs) -> dict[str, float]:
    """Of the axes whose messages are in the blocks' own time; of the slowest rank."""
    return {axis: float(seconds) for axis, seconds in estimated(costs).exposed.items()}


def _saved(setup: Setup) -> Iterator[float]:
    """Bytes that a block, the embedding and the head keep for backward, of one micro-batch."""
    parts = (block_activations, embedding_activations, head_activations)
    return (float(activations(setup).saved) for activations in parts)


def _held(job: Job, rank: int) -> int:
    """Bytes of weights, gradients and states of a rank of the pipeline, each at its most."""
    ledger = account(job, Place(pp=rank))
    return sum(ledger.peak(role) for role in ROLES)
