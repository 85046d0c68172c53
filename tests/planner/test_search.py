"""The search finds what playing every layout finds, and its bounds never rule out a better one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fivefold.hardware.cluster import Cluster, find_cluster
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.planner.keys import as_sections
from fivefold.planner.memory.fullest_rank import GIB, counted_on, memory
from fivefold.planner.memory.known_activations import NUMBERS
from fivefold.planner.play.arrays import taken
from fivefold.planner.play.step_time import step_times
from fivefold.planner.play.timed import Timed
from fivefold.planner.search import best
from fivefold.planner.search.best import SearchResult, search
from fivefold.planner.search.bounds import least_time, least_with_messages
from fivefold.planner.search.candidates import (
    EVERYTHING,
    Choices,
    candidates,
    data_splits,
    model_splits,
)
from fivefold.planner.search.known_parts import KnownParts
from fivefold.planner.search.memory_bounds import least_memory, least_of_ends
from fivefold.planner.time.parts import Costs
from tests.planner import drawn
from tests.planner.durations import seconds
from tests.planner.goals import goal_for

H100 = find_cluster("dgx-h100")
GOALS = {
    "dense": goal_for(PRESETS["llama3-8b"], 16, global_batch=64),
    "experts": goal_for(drawn.spec(8, 32_000, 1024, experts=4), 8, seq_len=2048, global_batch=16),
}


FEW = Choices(recompute=("none", "full"), cp_kind=("ring",), micro_batch=(1, 2), virtual_stages=(2,))
"""Few enough to play them all."""


@pytest.mark.parametrize(
    ("name", "choices"),
    [("dense", FEW), *(pytest.param(name, EVERYTHING, marks=pytest.mark.slow) for name in GOALS)],
)
def test_bounds_hold_for_every_candidate(name: str, choices: Choices) -> None:
    setups = list(candidates(GOALS[name], choices))
    every_costs = [Costs.of(setup, H100) for setup in setups]
    for setup, costs, times in zip(setups, every_costs, step_times(every_costs), strict=True):
        assert (least_time(costs) <= times * (1 + 1e-9)).all()
        assert (least_with_messages(costs, Timed.of(costs)) <= times * (1 + 1e-9)).all()
        needed = np.asarray(memory(setup, H100).device)
        assert (least_memory(setup, H100) <= needed).all()
        assert (least_of_ends(setup, H100) <= needed).all()


def test_what_bounds_a_split_of_the_model_bounds_all_its_layouts() -> None:
    for split in model_splits(GOALS["experts"], FEW):
        some = taken(split, np.arange(0, np.size(split.pp), 7))
        for row in range(np.size(some.pp)):
            one = taken(some, [row])
            seconds = float(np.squeeze(least_time(Costs.of(one, H100))))
            needs = float(np.squeeze(least_memory(one, H100)))
            for layouts in data_splits(one, FEW):
                assert np.min(least_time(Costs.of(layouts, H100))) >= seconds * (1 - 1e-12)
                assert np.min(least_memory(layouts, H100)) >= needs * (1 - 1e-12)


# --- every layout of a small model, played -----------------------------------------------------------------

SMALL = goal_for(drawn.spec(8, 32_000, 1024), 4, seq_len=2048, global_batch=8)


@pytest.fixture(scope="module")
def every() -> list[tuple[Setup, float, float]]:
    """(layout, seconds, bytes) of each."""
    setups = list(candidates(SMALL, FEW))
    found = []
    for setup, times in zip(setups, step_times([Costs.of(setup, H100) for setup in setups]), strict=True):
        needs = np.broadcast_to(memory(setup, H100).device, len(times))
        found += [(taken(setup, row), float(times[row]), float(needs[row])) for row in range(len(times))]
    return found


def with_room(needed: float) -> Cluster:
    """A cluster on which a layout that needs so many bytes just fits."""
    gib = H100.device.memory_gib * needed / (counted_on(H100) * GIB) * (1 + 1e-9)
    return replace(H100, device=replace(H100.device, memory_gib=gib))


@pytest.mark.parametrize("given", [{}, {"pp": 2}, {"tp": 2}, {"zero": 3, "pp": 2}])
def test_the_fastest_that_fits_is_found_however_little_memory_there_is(
    given: dict[str, int], every: list[tuple[Setup, float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at in small batches, as a large search does."""
    monkeypatch.setattr(best, "BATCH", 8)
    monkeypatch.setattr(best, "TOGETHER", 4)
    mine = [one for one in every if all(getattr(one[0], key) == value for key, value in given.items())]
    sizes = sorted(needs for _, _, needs in mine)
    choices = replace(FEW, given=given, zero=(given["zero"],) if "zero" in given else FEW.zero)
    for room in (sizes[0], sizes[len(sizes) // 8], sizes[len(sizes) // 3], sizes[-1]):
        found = search(SMALL, with_room(room), choices, best=1)
        fastest = min(seconds for _, seconds, needs in mine if needs <= room)
        assert found.best[0].step_time == pytest.approx(fastest, rel=1e-9)
    assert found.played < len(mine)


def test_what_only_zero_3_in_a_pipeline_fits_into_is_found() -> None:
    goal = goal_for(drawn.spec(13, 4096, 4096), 8, seq_len=512, global_batch=8)
    choices = replace(FEW, schedule=("1f1b",), given={"pp": 2, "tp": 1, "cp": 1})
    least = dict.fromkeys(FEW.zero, np.inf)
    for setup in candidates(goal, choices):
        least[setup.zero] = min(least[setup.zero], float(np.min(memory(setup, H100).device)))
    assert least[3] < 0.9 * min(least[zero] for zero in (0, 1, 2))
    assert search(goal, with_room(least[3]), choices).best[0].setup.zero == 3


def test_where_nothing_fits_the_nearest_is_the_leanest_of_all(
    every: list[tuple[Setup, float, float]],
) -> None:
    least = min(needs for _, _, needs in every)
    found = search(SMALL, with_room(0.9 * least), FEW)
    assert found.best == []
    assert found.nearest is not None
    assert float(found.nearest.memory.device) == pytest.approx(least)


def degrees(found: SearchResult) -> list[tuple[int, ...]]:
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    return [tuple(as_sections(planned.setup)["layout"][name] for name in names) for planned in found.best]


@pytest.fixture(scope="module")
def dense() -> SearchResult:
    return search(GOALS["dense"], H100, best=5)


def test_each_line_of_the_table_is_another_split_and_fits(dense: SearchResult) -> None:
    found = dense
    assert len(set(degrees(found))) == len(found.best) == 5
    assert [p.step_time for p in found.best] == sorted(p.step_time for p in found.best)
    assert all(float(p.memory.device) / GIB <= counted_on(H100) for p in found.best)


def test_the_front_trades_memory_for_speed(dense: SearchResult) -> None:
    front = dense.front
    needs, times = [float(p.memory.device) for p in front], [p.step_time for p in front]
    assert needs == sorted(needs)
    assert times == sorted(times, reverse=True)
    assert len(front) > 2


def test_one_layout_taken_out_of_many_is_what_it_is_alone(dense: SearchResult) -> None:
    for planned in dense.best[:3]:
        assert planned.step_time == pytest.approx(seconds(planned.setup, H100), rel=1e-12)
        assert planned.breakdown.step_time == pytest.approx(planned.step_time, rel=1e-9)
        assert float(memory(planned.setup, H100).device) == pytest.approx(float(planned.memory.device))


def test_degrees_of_any_size_are_kept_apart() -> None:
    """cp 32,768 beside tp: looked up by a number made of all of them, one must not run into the next."""
    goal = goal_for(PRESETS["llama3.2-1b"], 32_768, seq_len=131_072, global_batch=8)
    setups = [setup for setup in candidates(goal) if np.max(setup.cp) == 32_768]
    assert setups
    for setup in setups[:3]:
        known, computed = KnownParts(H100).costs(setup).block, Costs.of(setup, H100).block
        assert (np.asarray(known.total) == np.asarray(computed.total)).all()


def test_numbers_too_large_to_be_looked_up_are_computed() -> None:
    numbers: dict[str, Any] = {name: np.array([1]) for name in NUMBERS} | {"micro_batch": np.array([20_000])}
    setup = replace(GOALS["dense"].setup, **numbers)
    assert KnownParts(H100).costs(setup).block.total == Costs.of(setup, H100).block.total


def test_a_restricted_search_stays_inside() -> None:
    found = search(SMALL, H100, Choices(given={"tp": 4}))
    assert {as_sections(p.setup)["layout"]["tp"] for p in found.best} == {4}
    assert all(as_sections(p.setup)["training"]["recompute"] in EVERYTHING.recompute for p in found.best)


def test_a_mask_and_an_index_choose_layouts() -> None:
    setup = next(iter(candidates(GOALS["dense"])))
    mask = np.asarray(setup.micro_batch) == 2
    assert set(np.asarray(taken(setup, mask).micro_batch)) == {2}
    assert isinstance(taken(setup, 0).micro_batch, int)
