"""The step of ONE layout, played: its pipeline event by event, or its blocks where there is none."""

from __future__ import annotations

import numpy as np

from fivefold.hardware.cluster import Cluster
from fivefold.ledger.setup import Setup
from fivefold.planner.blocks import blocks_time
from fivefold.planner.parts import Bench
from fivefold.planner.profiles import OURS, Constants, Stack
from fivefold.planner.schedule import makespan
from fivefold.planner.simulate import Durations
from fivefold.planner.stage_layers import stage_counts
from fivefold.planner.time import optimizer_time, state_time


def simulated_step(
    setup: Setup, cluster: Cluster, stack: Stack = OURS, constants: Constants | None = None
) -> float:
    """Seconds of a step, as `step.simulated` plays it; without a pipeline of our own program alone."""
    bench = Bench.of(setup, cluster, stack, constants)
    if int(setup.pp) == 1:
        return blocks_time(bench)
    ranks, micro_batches, virtual_stages = int(setup.pp), int(setup.micro_batches), int(setup.virtual_stages)
    piped = makespan(setup.schedule, ranks, micro_batches, virtual_stages, durations(bench))
    return piped + float(state_time(bench)) + float(optimizer_time(bench))


def durations(bench: Bench) -> Durations:
    """Seconds of each stage for a micro-batch, for event simulation."""
    counts = stage_counts(bench.setup, bench.stack, int(bench.setup.stages))

    def of(phase: str) -> tuple[float, ...]:
        times = [float(count * getattr(bench.block, phase)) for count in counts]
        times[0] += float(getattr(bench.embedding, phase))
        times[-1] += float(getattr(bench.head, phase))
        return tuple(times)

    return Durations(
        of("forward"), of("backward_input"), of("backward_weight"), float(np.asarray(bench.transfer))
    )
