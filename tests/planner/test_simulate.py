"""The simulator against published bubbles, closed forms, and what must hold of any timeline."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fivefold.planner.play.computations import Durations
from fivefold.planner.play.timeline import Event, Timeline, play, played
from fivefold.problems import BadInput
from fivefold.report.simulated_schedule import problems
from fivefold.schedules import SCHEDULES, Action, schedule_named
from fivefold.schedules.actions import COMPUTATIONS
from tests.planner.durations import equal

# Zero Bubble Pipeline Parallelism (Qi et al., arXiv 2401.10241, ICLR 2024): profiled milliseconds of F, B, W
# and a transfer, and the bubble rates printed for them.
COLUMNS = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p")
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1055, 0.1585, 0.1083, 0.1585, 0.0433)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.0818, 0.1242, 0.0837, 0.1242, 0.0039)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0443, 0.0674, 0.0444, 0.0674, 0.0026)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1104, 0.1397, 0.0672, 0.1397, 0.0066)),
    (16, 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.0852, 0.1088, 0.0516, 0.1088, 0.0054)),
    (16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0445, 0.0576, 0.0266, 0.0576, 0.0028)),
]
# 1f1b and the handcrafted ones agree to the printed digits; a searched schedule is as good as its search.
WITHIN = dict.fromkeys(COLUMNS, 0.00006) | {"interleaved": 0.005, "zb-1p": 0.001, "zb-2p": 0.001}


def alike(schedule: str, ranks: int, count: int, *times: float, virtual: int = 1) -> Timeline:
    """A schedule whose ranks are all alike."""
    return played(schedule, ranks, count, virtual, equal(ranks, virtual, *times))


# --- published ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", COLUMNS)
@pytest.mark.parametrize(("ranks", "count", "times", "bubbles"), PUBLISHED)
def test_published_bubbles(
    schedule: str, ranks: int, count: int, times: tuple[float, ...], bubbles: tuple[float, ...]
) -> None:
    found = alike(schedule, ranks, count, *times, virtual=3 if schedule == "interleaved" else 1)
    published = bubbles[COLUMNS.index(schedule)]
    assert found.bubble == pytest.approx(published, abs=WITHIN[schedule])


def test_texts_figures() -> None:
    """4 stages and 4 micro-batches: 57% useful. 3 stages and no micro-batches: two thirds are bubble."""
    assert 1 - alike("gpipe", 4, 4, 1, 1, 1).bubble == pytest.approx(4 / 7)
    assert alike("naive", 3, 1, 1, 1, 1).bubble == pytest.approx(2 / 3)
    for ranks in (2, 5, 8):
        for count in (1, 6):
            assert 1 - alike("naive", ranks, count, 2, 3, 1).bubble == pytest.approx(1 / ranks)


# --- closed forms ------------------------------------------------------------------------------------------

TIME = st.floats(0.1, 10)


@given(st.integers(1, 8), st.integers(1, 20), TIME, TIME, TIME)
@settings(deadline=None, max_examples=60)
def test_gpipe_and_1f1b_fill_and_drain_once(ranks: int, count: int, f: float, b: float, w: float) -> None:
    expected = (ranks - 1) / (count + ranks - 1)
    assert alike("gpipe", ranks, count, f, b, w).bubble == pytest.approx(expected, abs=1e-9)
    assume(count >= ranks)
    assert alike("1f1b", ranks, count, f, b, w).bubble == pytest.approx(expected, abs=1e-9)


@given(st.integers(2, 8), st.integers(1, 8), TIME, TIME, TIME, TIME)
@settings(deadline=None, max_examples=40)
def test_naive_pays_for_every_transfer(
    ranks: int, count: int, f: float, b: float, w: float, transfer: float
) -> None:
    found = alike("naive", ranks, count, f, b, w, transfer)
    assert found.step_time == pytest.approx(count * (ranks * (f + b + w) + 2 * (ranks - 1) * transfer))


@given(st.integers(2, 8), st.integers(0, 12), TIME)
@settings(deadline=None, max_examples=40)
def test_zero_bubble_formulas_hold_where_all_times_are_equal(ranks: int, more: int, time: float) -> None:
    """(p - 1)(F + B - W) for zb-h1, and (p - 1)(F + B - 2W), which is nothing, for zb-h2."""
    count = 2 * ranks + more
    work = 3 * time * count
    assert alike("zb-h1", ranks, count, time, time, time).step_time == pytest.approx(
        work + (ranks - 1) * time
    )
    assert alike("zb-h2", ranks, count, time, time, time).step_time == pytest.approx(work)


def test_the_slowest_stage_decides() -> None:
    slow = Durations((1.0, 1.0, 3.0, 1.0), (1.0, 1.0, 3.0, 1.0), (1.0, 1.0, 3.0, 1.0))
    found = played("1f1b", 4, 50, 1, slow)
    # 50 micro-batches on the slow rank; the first on its way there, the last on its way back.
    assert found.step_time == pytest.approx(50 * 9 + 2 * 1 + 2 * 2)
    assert found.busy == pytest.approx([150, 150, 450, 150])
    assert found.bubble == pytest.approx(1 - (3 * 150 + 450) / 4 / 456)


# --- what is kept ------------------------------------------------------------------------------------------


def test_micro_batches_in_flight() -> None:
    def peaks(schedule: str, virtual: int = 1) -> list[float]:
        return alike(schedule, 4, 12, 1, 1, 1, virtual=virtual).peak_in_flight

    assert peaks("naive") == [1, 1, 1, 1]
    assert peaks("gpipe") == [12, 12, 12, 12]
    assert peaks("1f1b") == [4, 3, 2, 1]
    assert peaks("zb-h1") == [4, 4, 4, 4]
    assert peaks("zb-h2") == [7, 7, 7, 7]
    # p (1 + (p - 1) / pv) on the first rank (Korthikanti et al., arXiv 2205.05198).
    assert peaks("interleaved", 3)[0] == pytest.approx(4 * (1 + 3 / 12))


def test_a_parallelogram_is_longer_than_any_rank_is_busy() -> None:
    found = alike("zb-h2", 4, 16, 1, 1, 1)
    assert found.step_time == pytest.approx(48)
    assert found.makespan == pytest.approx(51)


# --- any timeline ------------------------------------------------------------------------------------------


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int, Durations]:
    schedule = draw(st.sampled_from(list(SCHEDULES)))
    ranks, count = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    virtual = SCHEDULES[schedule].stages or draw(st.integers(1, 3))
    assume(SCHEDULES[schedule].allows(ranks, count))
    times = st.lists(st.floats(0.1, 5), min_size=ranks * virtual, max_size=ranks * virtual)
    f, b, w = (tuple(draw(times)) for _ in range(3))
    return schedule, ranks, count, virtual, Durations(f, b, w, draw(st.floats(0, 3)))


@given(pipelines())
@settings(deadline=None, max_examples=200)
def test_nobody_starts_before_what_it_needs_is_there(case: tuple[str, int, int, int, Durations]) -> None:
    schedule, ranks, count, virtual, durations = case
    found = played(*case)
    stages = ranks * virtual
    done: dict[tuple[str, int, int], Event] = {}
    for event in chain(*found.rows):
        kind = "backward-input" if event.kind == "backward" else event.kind
        assert (kind, event.stage, event.micro_batch) not in done
        done[kind, event.stage, event.micro_batch] = event
        assert event.rank == SCHEDULES[schedule].rank_of(event.stage, ranks)
        taking = durations.table()[COMPUTATIONS.index(event.kind), event.stage, 0]  # type: ignore[arg-type]
        assert event.end - event.start == pytest.approx(taking)
    for row in found.rows:
        assert all(one.end <= other.start + 1e-9 for one, other in pairwise(row))
    for (kind, stage, number), event in done.items():
        before = {"forward": ("forward", stage - 1), "backward-input": ("backward-input", stage + 1)}.get(
            kind
        )
        if kind == "backward-weight":
            assert done["backward-input", stage, number].end <= event.start + 1e-9
        elif before is not None and 0 <= before[1] < stages:
            maker = done[before[0], before[1], number]
            away = durations.transfer if maker.rank != event.rank else 0.0
            assert maker.end + away <= event.start + 1e-9
        if kind == "backward-input":
            assert done["forward", stage, number].end <= event.start + 1e-9
    assert {(stage, number) for kind, stage, number in done if kind == "forward"} == {
        (stage, number) for stage in range(stages) for number in range(count)
    }


@given(pipelines())
@settings(deadline=None, max_examples=100)
def test_figures_fit_together(case: tuple[str, int, int, int, Durations]) -> None:
    found = played(*case)
    assert found.makespan >= found.step_time - 1e-9 >= max(found.busy) - 2e-9
    assert -1e-9 <= found.bubble < 1
    for rank in range(found.ranks):
        levels = [level for _, level in found.in_flight(rank)]
        assert levels[-1] == 0
        assert min(levels) >= 0
        assert 0 < found.peak_in_flight[rank] <= case[2]


@given(pipelines())
@settings(deadline=None, max_examples=60)
def test_no_rank_waits_for_nothing(case: tuple[str, int, int, int, Durations]) -> None:
    """Whatever starts, starts when its rank is free or when what it needs arrives."""
    durations = case[-1]
    found = played(*case)
    ends = {
        (event.kind == "forward", event.stage, event.micro_batch): event
        for event in chain(*found.rows)
        if event.kind != "backward-weight"
    }
    for row in found.rows:
        free = 0.0
        for event in row:
            forward = event.kind == "forward"
            maker = ends.get((forward, event.stage - 1 if forward else event.stage + 1, event.micro_batch))
            if maker is None or event.kind == "backward-weight":
                arrival = 0.0
            else:
                arrival = maker.end + (durations.transfer if maker.rank != event.rank else 0.0)
            assert event.start == pytest.approx(max(free, arrival))
            free = event.end


@pytest.mark.parametrize("schedule", [row.name for row in SCHEDULES.values() if row.order is not None])
def test_the_list_that_ranks_run_plays_the_same(schedule: str) -> None:
    """Messages in the list are not waited for: they are in the waits of what needs them."""
    row = SCHEDULES[schedule]
    virtual = row.usual_stages
    durations = equal(4, virtual, 3, 2, 1, 0.5)
    rows = row.actions(4, 8, virtual)
    assert any(action.kind == "send-activation" for row in rows for action in row)
    orders = [row.computed(rank, 4, 8, virtual) for rank in range(4)]
    assert play(rows, durations) == play(orders, durations)


def test_a_circle_is_found() -> None:
    first = [Action("backward", 0, 0), Action("forward", 0, 0)]
    second = [Action("forward", 1, 0), Action("backward", 1, 0)]
    with pytest.raises(ValueError, match="circle"):
        play([first, second], equal(2, 1, 1, 1, 1))


# --- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "key", "words"),
    [
        (("1f1b", 4, 3, 1), "--micro-batches", "--micro-batches 4"),
        (("interleaved", 4, 9, 2), "--micro-batches", "--micro-batches 8, or --micro-batches 10"),
        (("dualpipev", 4, 7, 2), "--micro-batches", "--micro-batches 8"),
        (("1f1b", 4, 8, 2), "--virtual-stages", "a rank holds 1"),
        (("zbv", 4, 8, 3), "--virtual-stages", "a rank holds 2"),
        (("gpipe", 0, 8, 1), "--stages", "at least 1"),
        (("gpipe", 4, -1, 1), "--micro-batches", "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(case: tuple[str, int, int, int], key: str, words: str) -> None:
    schedule, *numbers = case
    (problem,) = problems(SCHEDULES[schedule], *numbers)
    assert problem.key == key
    assert words in problem.hint


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(BadInput, match=r"--schedule: '1f1bb' is unknown\n    Did you mean '1f1b'\?"):
        schedule_named("1f1bb", "--schedule")


def test_what_can_be_is_not_refused() -> None:
    for schedule in SCHEDULES.values():
        assert problems(schedule, 4, 8, schedule.stages or 1) == []
