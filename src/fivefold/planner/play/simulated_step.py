"""A job's step on a cluster, simulated: every rank of its pipeline, or one rank block by block without one.

Stage and block times come from the time model, bytes from the ledger. All times are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fivefold.axes.layout import Place
from fivefold.axes.stages import stages
from fivefold.config import Job
from fivefold.hardware.cluster import Cluster
from fivefold.ledger.ledger import Role
from fivefold.ledger.setup import Setup
from fivefold.planner.play.any_schedule import played
from fivefold.planner.play.blocks import Streams, play_blocks
from fivefold.planner.play.one_layout import durations
from fivefold.planner.play.timeline import Durations, Event, Timeline
from fivefold.planner.time.estimate import estimated, optimizer_time, state_time
from fivefold.planner.time.parts import Costs
from fivefold.replay.account import account
from fivefold.replay.activations import block_activations, embedding_activations, head_activations

ROLES: tuple[Role, ...] = ("weights", "gradients", "states")
Curve = list[tuple[float, float]]
"""(time, level from then on), at each change."""


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
    setup = Setup.of(job)
    return _piped(job, setup, cluster) if job.layout.pp > 1 else _plain(job, setup, cluster)


# --- with a pipeline -----------------------------------------------------------------------------------


def _piped(job: Job, setup: Setup, cluster: Cluster) -> SimulatedStep:
    costs = Costs.of(setup, cluster)
    took = durations(costs)
    timeline = _timeline(setup, took)
    waiting_for_messages = timeline.makespan - _timeline(setup, replace(took, transfer=0.0)).makespan
    data, optimizer = float(state_time(costs)), float(optimizer_time(costs))
    rows = {}
    for rank, row in enumerate(timeline.rows):
        rows[f"rank {rank}"] = [*row, *_ending(rank, timeline.makespan, data, optimizer)]
    saved = [_saved(setup, parts) for parts in stages(job)]
    return SimulatedStep(
        rows=rows,
        step_time=timeline.makespan + data + optimizer,
        bubble=timeline.bubble,
        optimizer=optimizer,
        exposed=_exposed(costs) | {"pp": waiting_for_messages, "dp": data},
        in_flight=timeline.peak_in_flight,
        memory={
            name: _kept(row, _held(job, rank), saved)
            for rank, (name, row) in enumerate(zip(rows, timeline.rows, strict=True))
        },
    )


def _timeline(setup: Setup, took: Durations) -> Timeline:
    ranks, micro_batches, virtual_stages = setup.pp, setup.micro_batches, setup.virtual_stages
    return played(setup.schedule, int(ranks), int(micro_batches), int(virtual_stages), took)


def _ending(rank: int, start: float, data: float, optimizer: float) -> Iterator[Event]:
    """What is put behind the passes: the data axis' messages that no compute hides, and the update."""
    if data > 0:
        yield Event(rank, "exposed", -1, -1, start, start + data)
    yield Event(rank, "optimizer", -1, -1, start + data, start + data + optimizer)


# --- without one ---------------------------------------------------------------------------------------


def _plain(job: Job, setup: Setup, cluster: Cluster) -> SimulatedStep:
    costs = Costs.of(setup, cluster)
    streams = play_blocks(costs, int(setup.micro_batches))
    summed = streams.end + streams.late
    rows = {
        "compute": [*streams.compute, Event(0, "optimizer", -1, -1, summed, summed + streams.optimizer)],
        "messages": [*streams.messages, *_late(streams)],
    }
    saved = [_saved(setup, [part]) for part in ("embedding", *["blocks."] * setup.spec.layers, "head")]
    return SimulatedStep(
        rows={name: row for name, row in rows.items() if row},
        step_time=streams.step_time,
        bubble=0.0,
        optimizer=streams.optimizer,
        exposed=_exposed(costs) | {"pp": 0.0, "dp": streams.exposed},
        in_flight=[1.0],
        memory={"memory": _kept(streams.compute, _held(job, 0), saved)},
    )


def _late(streams: Streams) -> Iterator[Event]:
    if streams.late > 0:
        yield Event(0, "reduce", -1, -1, streams.end, streams.end + streams.late)


# --- both ----------------------------------------------------------------------------------------------


def _exposed(costs: Costs) -> dict[str, float]:
    """Of the axes whose messages are in the blocks' own time; of the slowest rank."""
    return {axis: float(seconds) for axis, seconds in estimated(costs).exposed.items()}


def _saved(setup: Setup, parts: Sequence[str]) -> float:
    """Bytes that these parts of the model keep for backward, of one micro-batch."""
    blocks = sum(part.startswith("blocks.") for part in parts)
    found = blocks * float(block_activations(setup).saved) if blocks else 0.0
    if "embedding" in parts:
        found += float(embedding_activations(setup).saved)
    if "head" in parts:
        found += float(head_activations(setup).saved)
    return found


def _held(job: Job, rank: int) -> int:
    """Bytes of weights, gradients and states of a rank of the pipeline, each at its most."""
    ledger = account(job, Place(pp=rank))
    return sum(ledger.peak(role) for role in ROLES)


def _kept(row: Sequence[Event], held: float, saved: Sequence[float]) -> Curve:
    """A rank's bytes over time. Activations are there from a stage's forward to the end of its backward."""
    level, found = held, []
    for event in row:
        if event.kind == "forward":
            level += saved[event.stage]
            found.append((event.start, level))
        elif event.kind in ("backward", "backward-weight"):
            level -= saved[event.stage]
            found.append((event.end, level))
    return found
