"""The step of ONE layout, played: its pipeline event by event, or its blocks where there is none."""

from __future__ import annotations

import numpy as np

from fivefold.hardware.cluster import Cluster
from fivefold.ledger.setup import Setup
from fivefold.planner.play.any_schedule import makespan
from fivefold.planner.play.blocks import blocks_time
from fivefold.planner.play.timeline import Durations
from fivefold.planner.time.estimate import optimizer_time, state_time
from fivefold.planner.time.parts import Costs
from fivefold.planner.time.stack import OURS, Constants, Stack


def simulated_step(
    setup: Setup, cluster: Cluster, stack: Stack = OURS, constants: Constants | None = None
) -> float:
    """Seconds of a step, as `simulated_step.py` plays it; without a pipeline of our own program alone."""
    costs = Costs.of(setup, cluster, stack, constants)
    if int(setup.pp) == 1:
        return blocks_time(costs)
    piped = makespan(*pipeline(setup), durations(costs))
    return piped + float(state_time(costs)) + float(optimizer_time(costs))


def pipeline(setup: Setup) -> tuple[str, int, int, int]:
    """The schedule of ONE layout, its ranks, micro-batches, and stages on each rank."""
    return setup.schedule, int(setup.pp), int(setup.micro_batches), int(setup.virtual_stages)


def durations(costs: Costs) -> Durations:
    """Seconds of each stage for a micro-batch, for event simulation."""
    counts = [load.layers for load in costs.stack.cut(costs.setup, int(costs.setup.stages))]

    def of(phase: str) -> tuple[float, ...]:
        times = [float(count * getattr(costs.block, phase)) for count in counts]
        times[0] += float(getattr(costs.embedding, phase))
        times[-1] += float(getattr(costs.head, phase))
        return tuple(times)

    return Durations(
        of("forward"), of("backward_input"), of("backward_weight"), float(np.asarray(costs.transfer))
    )
