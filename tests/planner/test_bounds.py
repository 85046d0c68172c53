"""Bounds of a search are never above what is played: no layout is ruled out that could be the best."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings

from fivefold.hardware.cluster import Cluster, find_cluster
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.planner.memory.fullest_rank import memory
from fivefold.planner.play.step_time import step_times
from fivefold.planner.play.timed import Timed
from fivefold.planner.search.bounds import least_time, least_with_messages
from fivefold.planner.search.memory_bounds import least_memory, least_of_ends
from fivefold.planner.time.parts import Costs
from fivefold.schedules import SCHEDULES
from tests.planner.drawn import clusters, layouts

NEAR = 1 + 1e-9


@pytest.mark.parametrize("schedule", ["", *SCHEDULES])
def test_no_step_is_shorter_than_its_bounds(schedule: str) -> None:
    @given(layouts((schedule,)), clusters())
    @settings(deadline=None, max_examples=20)
    def hold(setup: Setup, cluster: Cluster) -> None:
        costs = Costs.of(setup, cluster)
        [[taking]] = step_times([costs])
        assert float(np.squeeze(least_time(costs))) <= taking * NEAR
        assert float(np.squeeze(least_with_messages(costs, Timed.of(costs)))) <= taking * NEAR

    hold()


@given(layouts(), clusters())
@settings(deadline=None, max_examples=120)
def test_no_rank_needs_less_memory_than_its_bound(setup: Setup, cluster: Cluster) -> None:
    assume(setup.pipeline.order is not None)  # ours runs no order that is searched for
    least = max(float(np.squeeze(bound(setup, cluster))) for bound in (least_memory, least_of_ends))
    assert least <= float(np.squeeze(memory(setup, cluster).device)) * NEAR


@pytest.mark.parametrize(
    "schedule", [name for name, row in SCHEDULES.items() if row.shape == "v" and row.order is not None]
)
def test_where_activations_are_most_of_the_memory_the_bound_holds(schedule: str) -> None:
    """The first rank of a V has no more micro-batches in flight than there are ranks."""
    setup = Setup(
        PRESETS["llama3-8b"],
        *(8192, 64, PRECISIONS["bf16"]),
        micro_batch=2,
        pp=8,
        virtual_stages=2,
        schedule=schedule,
    )
    cluster = find_cluster("dgx-h100")
    assert float(least_memory(setup, cluster)) <= float(np.squeeze(memory(setup, cluster).device)) * NEAR
