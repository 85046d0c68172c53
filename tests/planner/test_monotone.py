"""A better machine is never slower: a layout as it is played, and the best that a search finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.backtest.stacks import stack_named
from fivefold.hardware.cluster import Cluster, find_cluster
from fivefold.hardware.presets import CLUSTERS
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.planner.goal import Goal
from fivefold.planner.search.best import search
from fivefold.planner.search.candidates import EVERYTHING, Choices
from fivefold.schedules import SCHEDULES
from tests.planner.drawn import SPECS, clusters, layouts
from tests.planner.durations import seconds
from tests.planner.goals import goal_for
from tests.planner.test_rates import PAIRS

STACKS = ("fivefold", "nanotron", "megatron-deepspeed", "zero-bubble", "torchtitan")
FEW = Choices((1, 3), ("1f1b", "zbv"), recompute=("none", "full"), cp_kind=("ring",), micro_batch=(1, 4))
FEWER = Choices((1, 3), ("1f1b",), recompute=("none",), cp_kind=("ring",), micro_batch=(1, 4))
"""Few enough for many searches."""
NEAR = 1 + 1e-9
SEARCHED = 1.05
"""An order that is searched for is found anew for other times, by greedy rules: it may be a worse one."""
FOUND = 1.005
"""What a search may find of a better machine, relative to what it found of the other."""

Better = Callable[[Cluster, float], Cluster]


def of_device(*names: str) -> Better:
    """A device that has more of something."""

    def better(cluster: Cluster, gain: float) -> Cluster:
        changes: dict[str, Any] = {name: gain * getattr(cluster.device, name) for name in names}
        return replace(cluster, device=replace(cluster.device, **changes))

    return better


def peak(cluster: Cluster, gain: float) -> Cluster:
    peaks = {dtype: gain * rate for dtype, rate in cluster.device.peak_flops.items()}
    return replace(cluster, device=replace(cluster.device, peak_flops=peaks))


def of_links(number: int, bandwidth: float, latency: float) -> Better:
    """Links of one level, counted from the outermost, that are better by powers of the gain."""

    def better(cluster: Cluster, gain: float) -> Cluster:
        levels = list(cluster.levels)
        place = max(len(levels) - 1 - number, 0)
        level = levels[place]
        levels[place] = replace(
            level, bandwidth=level.bandwidth * gain**bandwidth, latency=level.latency / gain**latency
        )
        return replace(cluster, levels=tuple(levels))

    return better


def roomier_and_nearer(cluster: Cluster, gain: float) -> Cluster:
    """The next generation with the same peak, as a B300 is to a B200."""
    for better in (of_device("memory_gib"), *(of_links(number, 1, 0) for number in range(4))):
        cluster = better(cluster, gain)
    return cluster


PLAYED: dict[str, Better] = {
    "peak": peak,
    "memory's bandwidth": of_device("memory_bandwidth"),
    **{f"bandwidth {number}": of_links(number, 1, 0) for number in range(4)},
    **{f"latency {number}": of_links(number, 0, 1) for number in range(4)},
}
FOUND_BY_SEARCH = PLAYED | {"memory": of_device("memory_gib"), "memory and links": roomier_and_nearer}
gains = st.sampled_from([1.002, 1.05, 1.5, 4.0, 30.0])


def unnamed(cluster: Cluster) -> Cluster:
    """The cluster with a device of no known name: its constants follow from its figures alone."""
    return replace(cluster, device=replace(cluster.device, name="drawn"))


# --- one layout --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["", *SCHEDULES])
def test_a_layout_is_never_slower_on_a_better_machine(schedule: str) -> None:
    allowed = NEAR if not schedule or SCHEDULES[schedule].order else SEARCHED

    @given(layouts((schedule,)), clusters(), st.sampled_from(STACKS), gains)
    @settings(deadline=None, max_examples=8)
    def holds(setup: Setup, cluster: Cluster, name: str, gain: float) -> None:
        cluster, stack = unnamed(cluster), stack_named(name)
        taking = seconds(setup, cluster, stack)
        for what, better in PLAYED.items():
            assert seconds(setup, better(cluster, gain), stack) <= allowed * taking, what

    holds()


# --- what a search finds -----------------------------------------------------------------------------------


def found(goal: Goal, cluster: Cluster, choices: Choices = FEW) -> float:
    """Seconds of the best layout; without end where nothing fits."""
    best = search(goal, cluster, choices, best=1).best
    return best[0].step_time if best else float("inf")


def a_better_machine_is_planned_to_be_as_fast(examples: int, choices: Choices) -> None:
    models = st.sampled_from([*SPECS, PRESETS["llama3.2-1b"], PRESETS["llama3-8b"]])

    @given(models, st.sampled_from([4, 8, 16]), clusters(), st.sampled_from(list(FOUND_BY_SEARCH)), gains)
    @settings(deadline=None, max_examples=examples)
    def holds(spec: ModelSpec, gpus: int, cluster: Cluster, what: str, gain: float) -> None:
        precision = "fp32" if cluster.device.is_host else "bf16"
        goal = goal_for(spec, gpus, global_batch=32, precision=precision).changed(compile=True)
        better = FOUND_BY_SEARCH[what](unnamed(cluster), gain)
        assert found(goal, better, choices) <= FOUND * found(goal, unnamed(cluster), choices)

    holds()


def test_a_better_machine_is_planned_to_be_as_fast_at_least() -> None:
    a_better_machine_is_planned_to_be_as_fast(8, FEW)


@pytest.mark.slow
def test_a_better_machine_is_planned_to_be_as_fast_at_least_by_every_candidate() -> None:
    a_better_machine_is_planned_to_be_as_fast(12, EVERYTHING)


def test_a_higher_peak_is_planned_to_be_as_fast_at_least() -> None:
    """Some steps of benchmarks/plan_peaks.py."""
    goal, h100 = goal_for(PRESETS["llama3-8b"], 8).changed(compile=True), unnamed(find_cluster("dgx-h100"))
    own = h100.device.peak_flops["bfloat16"]
    times = [found(goal, peak(h100, teraflops * 1e12 / own), FEWER) for teraflops in range(300, 2501, 200)]
    for number, taking in enumerate(times[1:], start=1):
        assert taking <= FOUND * min(times[:number])


@pytest.mark.parametrize("model", ["llama3.2-1b", pytest.param("llama3-8b", marks=pytest.mark.slow)])
def test_a_better_cluster_of_the_table_is_planned_to_be_as_fast_at_least(model: str) -> None:
    goal = goal_for(PRESETS[model], 8, global_batch=32).changed(compile=True)
    names = sorted({name for pair in PAIRS for name in pair})
    took = {name: found(goal, CLUSTERS[name], FEWER) for name in names}
    assert ("dgx-b200", "dgx-b300") in PAIRS
    assert [pair for pair in PAIRS if took[pair[1]] > FOUND * took[pair[0]]] == []
