"""Times of stages and of steps, as tests ask for them."""

from __future__ import annotations

from fivefold.hardware.cluster import Cluster
from fivefold.ledger.setup import Setup
from fivefold.planner.play.computations import Durations
from fivefold.planner.play.step_time import step_times
from fivefold.planner.time.constants import Constants
from fivefold.planner.time.parts import Costs
from fivefold.planner.time.stack import OURS, Stack


def equal(
    ranks: int,
    virtual_stages: int,
    forward: float,
    backward_input: float,
    backward_weight: float,
    transfer: float = 0.0,
) -> Durations:
    """Ranks that are all alike: the times are those of all the stages of a rank together."""
    stages = ranks * virtual_stages
    f, b, w = ((time / virtual_stages,) * stages for time in (forward, backward_input, backward_weight))
    return Durations(f, b, w, transfer)


def seconds(setup: Setup, cluster: Cluster, stack: Stack = OURS, constants: Constants | None = None) -> float:
    """A step of ONE layout."""
    [[found]] = step_times([Costs.of(setup, cluster, stack, constants)])
    return float(found)
