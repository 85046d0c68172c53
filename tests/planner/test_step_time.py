"""A step as it is played: never shorter than what it waits for, and the same whoever is played beside it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes.checks import possible
from fivefold.axes.messages import Messages
from fivefold.backtest.published import PublishedRun, read_runs
from fivefold.backtest.stacks import stack_named, stacks
from fivefold.backtest.time_fit import predicted_times, shipped
from fivefold.hardware.cluster import Cluster, find_cluster
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameter_count
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.planner.play import timed as timed_module
from fivefold.planner.play.arrays import taken
from fivefold.planner.play.pipelined import Stages, stages_of
from fivefold.planner.play.step_time import breakdown, step_times
from fivefold.planner.play.timed import Order, Timed, numbers_of, order_of
from fivefold.planner.play.zero_bubble import search
from fivefold.planner.search.bounds import least_time, least_with_messages
from fivefold.planner.search.candidates import Choices, candidates
from fivefold.planner.time.parts import Costs
from fivefold.planner.time.rates import memory_time
from fivefold.planner.time.state import optimizer_time, our_optimizer_bytes
from fivefold.schedules import SCHEDULES, Action
from tests.planner.drawn import SLOWEST, SPECS, clusters, layouts
from tests.planner.goals import goal_for

STACKS = [name for name in stacks() if not name.endswith("-fp4")]
NEAR = 1e-9
RARE = ("zbv", "zb-1p")
"""Schedules of few published runs."""


def alone(costs: Costs) -> float:
    """Seconds of ONE layout."""
    [[found]] = step_times([costs])
    return float(found)


# --- the longest path --------------------------------------------------------------------------------------


def stages_in(costs: Costs) -> tuple[Order, Timed, Stages]:
    """What the step of ONE layout is made of, with all of its micro-batches."""
    order = order_of(costs, *(int(number[0]) for number in numbers_of(costs)))
    timed = Timed.of(costs)
    return order, timed, stages_of(order, timed)


def orders(order: Order, stages: Stages, transfer: float) -> list[list[Action]]:
    """What every rank computes, one after the other."""
    row = SCHEDULES[order.schedule]
    if row.memory_limit is not None:
        return search(row.memory_limit, order.ranks, order.played, stages.durations(order, transfer))
    return [
        list(row.computed(rank, order.ranks, order.played, order.virtual_stages))
        for rank in range(order.ranks)
    ]


def longest_path(rows: list[list[Action]], stages: Stages, transfer: float) -> dict[Action, float]:
    """When each computation ends at the earliest, without any message of the data axis: walked back."""
    before = {action: row[place - 1] if place else None for row in rows for place, action in enumerate(row)}
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    made = {
        (action.kind == "forward", *action[1:]): action
        for action in before
        if action.kind != "backward-weight"
    }
    halves = {"backward-input": (0,), "backward-weight": (1,), "backward": (0, 1)}
    back = (stages.backward_input, stages.backward_weight)

    def taking(action: Action) -> float:
        if action.kind == "forward":
            return float(stages.forward[action.stage, 0])
        return sum(float(back[half][action.stage, 0]) for half in halves[action.kind])

    ends: dict[Action, float] = {}

    def waits_for(action: Action) -> list[tuple[Action, float]]:
        forward = action.kind == "forward"
        found = [(one, 0.0) for one in (before[action],) if one is not None]
        if action.kind != "backward-weight":
            neighbour = action.stage - 1 if forward else action.stage + 1
            source = made.get((forward, neighbour, action.micro_batch))
            if source is not None:
                away = rank_of[neighbour] != rank_of[action.stage]
                found.append((source, transfer if away else 0.0))
        if not forward:  # of its own forward, too
            found.append((made[True, action.stage, action.micro_batch], 0.0))
        return found

    left = [action for row in rows for action in row]
    while left:
        action = left[-1]
        open_ones = [one for one, _ in waits_for(action) if one not in ends]
        if action in ends or not open_ones:
            start = max((ends[one] + away for one, away in waits_for(action)), default=0.0)
            ends[action] = start + taking(action)
            left.pop()
        left += open_ones
    return ends


def assert_never_shorter(costs: Costs) -> None:
    order, timed, stages = stages_in(costs)
    transfer = float(np.squeeze(timed.transfer))
    rows = orders(order, stages, transfer)
    ends = longest_path(rows, stages, transfer)
    rest = float(np.squeeze(timed.late)) + float(np.squeeze(timed.optimizer))
    taking = alone(costs)
    # All wait for the very first part, which cannot begin without weights that are gathered once.
    gathers = timed.parts(order.loads[0])[0].gathers
    waits = float(np.squeeze(gathers.with_once - gathers.without))
    assert taking * (1 + NEAR) >= waits + max(ends.values()) + rest
    for row in rows:
        last = next(action for action in reversed(row) if action.kind != "forward")
        # Of the stage that ends last the gradients of its first part have nothing left to hide behind.
        tail = float(stages.tail[last.stage, 0])
        assert taking * (1 + NEAR) >= waits + ends[last] + tail + rest
        mine = {action.stage for action in row}
        sent = sum(float(stages.reductions[stage, 0]) for stage in mine)
        unhidden = sum(float(stages.unhidden[stage, 0]) for stage in mine)
        assert taking * (1 + NEAR) >= sent + unhidden + rest
        assert taking * (1 + NEAR) >= waits + ends[row[-1]] + unhidden + rest


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_is_never_shorter_than_its_longest_path(schedule: str) -> None:
    @given(layouts((schedule,)), clusters(), st.sampled_from(STACKS))
    @settings(deadline=None, max_examples=12)
    def holds(setup: Setup, cluster: Cluster, stack: str) -> None:
        assert_never_shorter(Costs.of(setup, cluster, stack_named(stack)))

    holds()


@pytest.mark.parametrize("schedule", [name for name, row in SCHEDULES.items() if row.fewest(4) == 1])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_nor_with_fewer_micro_batches_than_stages(schedule: str, count: int) -> None:
    virtual = SCHEDULES[schedule].usual_stages
    setup = Setup(
        SPECS[-1],
        *(2048, 2 * count, PRECISIONS["bf16"]),
        **{"pp": 4, "virtual_stages": virtual, "schedule": schedule, "dp_shard": 2, "zero": 1},  # type: ignore[arg-type]
    )
    assert possible(setup)
    assert_never_shorter(Costs.of(setup, slow("dgx-h100")))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_more_micro_batches_take_longer(schedule: str, zero: int) -> None:
    """Beginning with one, of which nothing can be told apart by how often it is sent."""
    data: dict[str, Any] = {"dp_shard" if zero else "dp_replicate": 8, "zero": zero}
    virtual = SCHEDULES[schedule].usual_stages
    layout: dict[str, Any] = {"pp": 4, "virtual_stages": virtual, "schedule": schedule} | data
    counts = [count for count in (1, 2, 3, 4, 5, 8, 12) if SCHEDULES[schedule].allows(4, count)]
    setups = [Setup(SPECS[-1], 2048, 8 * count, PRECISIONS["bf16"], **layout) for count in counts]
    times = [float(found[0]) for found in step_times([Costs.of(s, slow("dgx-h100")) for s in setups])]
    assert times == sorted(times)


@given(layouts(("",)), clusters(), st.sampled_from(STACKS))
@settings(deadline=None, max_examples=40)
def test_without_a_pipeline_a_step_is_its_compute_and_what_nothing_hides(
    setup: Setup, cluster: Cluster, stack: str
) -> None:
    """Each micro-batch is computed in full, behind the first part's weights and before its gradients.

    All messages of the data axis go one after the other.
    """
    costs = Costs.of(setup, cluster, stack_named(stack))
    order, timed, _ = stages_in(costs)
    parts = timed.parts(order.loads[0])
    compute = order.played * sum(float(part.forward) + float(part.backward) for part in parts)
    unhidden = sum(float(part.unhidden) for part in parts)
    rest = unhidden + float(np.squeeze(timed.late)) + float(np.squeeze(timed.optimizer))
    first = parts[0]
    ends = float(first.gathers.with_once) + float(first.reductions.with_once)
    assert alone(costs) * (1 + NEAR) >= compute + ends + rest
    sent = sum(
        float(kind.with_once) + (order.played - 1) * float(kind.without)
        for part in parts
        for kind in (part.gathers, part.gathers_again, part.reductions)
    )
    assert alone(costs) * (1 + NEAR) >= sent + rest


@pytest.mark.parametrize("every", [60, pytest.param(1, marks=pytest.mark.slow)])
def test_nor_are_published_runs(every: int) -> None:
    """Of other stacks, by the constants that come with the package."""
    runs = read_runs()[0]
    runs = [run for number, run in enumerate(runs) if number % every == 0 or run.setup.schedule in RARE]
    for run, taking in zip(runs, predicted_times(runs), strict=True):
        costs = Costs.of(run.setup, run.cluster, stack_named(run.stack), shipped(run))
        for least in (least_time(costs), least_with_messages(costs, Timed.of(costs))):
            assert float(np.squeeze(least)) <= taking * (1 + NEAR), run.source
    by_schedule: dict[str, list[PublishedRun]] = defaultdict(list)
    for run in runs:
        if run.setup.pp > 1 and run.setup.stages * run.setup.micro_batches < 5000:
            by_schedule[run.setup.schedule].append(run)
    assert {"1f1b", "interleaved", *RARE} == set(by_schedule)
    for some in by_schedule.values():
        for run in some[:: len(some) // 3 + 1]:
            assert_never_shorter(Costs.of(run.setup, run.cluster, stack_named(run.stack), shipped(run)))


def slow(name: str, bandwidth: float = SLOWEST) -> Cluster:
    """A preset whose links are slow, inside servers as well."""
    found = find_cluster(name)
    levels = (replace(level, bandwidth=min(bandwidth, level.bandwidth)) for level in found.levels)
    return replace(found, levels=tuple(levels))


# --- many at once, and long steps --------------------------------------------------------------------------


@given(st.lists(st.tuples(layouts(), clusters(), st.sampled_from(STACKS)), min_size=2, max_size=6))
@settings(deadline=None, max_examples=15)
def test_played_together_each_takes_what_it_takes_alone(cases: list[tuple[Setup, Cluster, str]]) -> None:
    every = [Costs.of(setup, cluster, stack_named(stack)) for setup, cluster, stack in cases]
    # The first one twice: with others of its own order.
    for costs, [together] in zip([*every, every[0]], step_times([*every, every[0]]), strict=True):
        assert together == pytest.approx(alone(costs), rel=1e-12)


@pytest.mark.parametrize("spec", [SPECS[4], SPECS[6]], ids=["experts", "dense"])
def test_candidates_played_together_take_what_each_takes_alone(spec: ModelSpec) -> None:
    goal = goal_for(spec, 8, seq_len=2048, global_batch=64)
    few = Choices((1, 3), recompute=("none",), cp_kind=("ring",), micro_batch=(2,), virtual_stages=(2,))
    setups = list(candidates(goal, few))
    times = step_times([Costs.of(setup, slow("dgx-h100")) for setup in setups])
    choose = np.random.default_rng(0)
    for setup, together in zip(setups, times, strict=True):
        row = int(choose.integers(len(together)))
        one = Costs.of(taken(setup, row), slow("dgx-h100"))
        assert together[row] == pytest.approx(alone(one), rel=1e-12)


LONG = [
    (schedule, spec, pp, pp * rounds + more)
    for schedule in ("", *(name for name, row in SCHEDULES.items() if row.order))
    for spec in (4, 6)
    for pp, rounds, more in (((2, 24, 0), (2, 24, 1), (4, 20, 3), (4, 24, 0)) if schedule else ((1, 40, 0),))
    if not schedule or SCHEDULES[schedule].allows(pp, pp * rounds + more)
]


@pytest.mark.parametrize(("schedule", "spec", "pp", "count"), LONG)
def test_a_long_step_takes_as_long_as_all_of_it_played(
    schedule: str, spec: int, pp: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    virtual = SCHEDULES[schedule].usual_stages if schedule else 1
    every = []
    for zero, cluster in ((0, find_cluster("dgx-h100")), (1, slow("dgx-a100")), (3, slow("dgx-h100"))):
        data: dict[str, Any] = {"dp_shard" if zero else "dp_replicate": 2, "zero": zero}
        layout: dict[str, Any] = {"pp": pp, "virtual_stages": virtual, "schedule": schedule} | data
        setup = Setup(SPECS[spec], 2048, 2 * count, PRECISIONS["bf16"], **layout)
        assert possible(setup)
        every.append(Costs.of(setup, cluster))
    monkeypatch.setattr(timed_module, "LONG", 0)
    shortened = step_times(every)
    monkeypatch.setattr(timed_module, "LONG", 10**9)
    monkeypatch.setattr(timed_module, "SEEN", 10**9)
    for short, whole in zip(shortened, step_times(every), strict=True):
        assert short == pytest.approx(whole, rel=0.01 if schedule else 1e-9)


# --- by hand -----------------------------------------------------------------------------------------------


def gather(costs: Costs, messages: Messages) -> float:
    """Seconds of a part's weights, once."""
    found = next(m for m in messages if m.operation == "all_gather" and m.phase == "forward")
    return float(costs.message(replace(found, count=1)))


def passed(parts: list[tuple[float, float]]) -> float:
    """One pass through (seconds of the gather, of computing) of parts, weights gathered one part ahead."""
    sent = computed = begun = 0.0
    for gathering, computing in parts:
        sent = max(sent, begun) + gathering
        begun = max(computed, sent)
        computed = begun + computing
    return computed


def by_hand(costs: Costs) -> float:
    """A step of 1f1b under ZeRO 3, followed from event to event."""
    setup, states = costs.setup, {str(part): sent for part, sent in costs.traffic.state.items()}
    ranks, count = int(setup.pp), int(setup.micro_batches)
    held = [[*["block"] * load.layers] for load in costs.stack.cut(setup, ranks)]
    held[0].insert(0, "embedding")
    held[-1].append("head")
    gathering = {name: gather(costs, messages) for name, messages in states.items()}
    again = {"embedding": 0.0, "block": gathering["block"], "head": 0.0}  # the head's are still there
    part = {name: getattr(costs, name) for name in states}
    forward = [passed([(gathering[name], float(part[name].forward)) for name in names]) for names in held]
    backward = [
        passed([(again[name], float(part[name].backward)) for name in reversed(names)]) for names in held
    ]
    transfer = float(costs.transfer)
    there: dict[tuple[str, int, int], float] = {}
    free = [0.0] * ranks
    left = [one_forward_one_backward(rank, ranks, count) for rank in range(ranks)]
    while any(left):
        for rank, order in enumerate(left):
            kind, number = order[0] if order else ("", -1)
            neighbour = rank - 1 if kind == "forward" else rank + 1
            at_an_end = not 0 <= neighbour < ranks
            if not order or (not at_an_end and (kind, neighbour, number) not in there):
                continue
            come = 0.0 if at_an_end else there[kind, neighbour, number] + transfer
            free[rank] = max(free[rank], come) + (forward if kind == "forward" else backward)[rank]
            there[kind, rank, number] = free[rank]
            order.pop(0)
    reducing = {
        name: sum(float(costs.message(m)) for m in messages if m.operation == "reduce_scatter")
        for name, messages in states.items()
    }
    done = max(end + sum(reducing[name] for name in names) for end, names in zip(free, held, strict=True))
    return done + float(costs.late) + float(optimizer_time(costs))


def one_forward_one_backward(rank: int, ranks: int, count: int) -> list[tuple[str, int]]:
    ahead = min(ranks - 1 - rank, count)
    found = [("forward", number) for number in range(ahead)]
    for number in range(count):
        found += [("forward", number + ahead)] if number + ahead < count else []
        found.append(("backward", number))
    return found


@pytest.mark.parametrize("model", ["llama3-8b", "llama3.2-1b"])
@pytest.mark.parametrize(("pp", "count"), [(2, 2), (4, 6), (4, 16), (8, 8)])
@pytest.mark.parametrize("bandwidth", [SLOWEST, 20e9])
def test_zero_3_in_a_pipeline_is_as_played_by_hand(model: str, pp: int, count: int, bandwidth: float) -> None:
    layout: dict[str, Any] = {"pp": pp, "schedule": "1f1b", "dp_shard": 8, "zero": 3}
    setup = Setup(PRESETS[model], 4096, 8 * count, PRECISIONS["bf16"], **layout)
    costs = Costs.of(setup, slow("dgx-h100", bandwidth))
    assert alone(costs) == pytest.approx(by_hand(costs), rel=0.1)
    assert breakdown(costs).step_time == pytest.approx(alone(costs))


def test_experts_are_updated_once_however_they_are_spread() -> None:
    """8 ranks share the states of all weights: an eighth each, at every ep."""
    spec, cluster = PRESETS["mixtral-8x7b"], find_cluster("dgx-h100")
    shared = parameter_count(spec) / 8
    for ep in (1, 2, 4, 8):
        setup = Setup(spec, 4096, 64, PRECISIONS["bf16"], dp_shard=8, ep=ep, zero=1)
        expected = memory_time(shared * our_optimizer_bytes(setup), cluster)
        assert float(optimizer_time(Costs.of(setup, cluster))) == pytest.approx(float(expected), rel=1e-5)
