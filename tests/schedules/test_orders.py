"""Our lists of actions against torch's own schedules, and against what makes any schedule right."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from fivefold.schedules import SCHEDULES, Action

CLASSES: dict[str, Any] = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "looped-bfs": theirs.ScheduleLoopedBFS,
    "zero-bubble": theirs.ScheduleInterleavedZeroBubble,
    "zbv": theirs.ScheduleZBVZeroBubble,
    "dualpipev": theirs.ScheduleDualPipeV,
}
KINDS = {"F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight"}
MESSAGES = {
    "SEND_F": "send-activation",
    "RECV_F": "receive-activation",
    "SEND_B": "send-gradient",
    "RECV_B": "receive-gradient",
}


ORDERED = [schedule.name for schedule in SCHEDULES.values() if schedule.order is not None]


def virtual_counts(schedule: str) -> tuple[int, ...]:
    held = SCHEDULES[schedule].stages
    return (1, 2, 3) if held is None else (held,)


GRID = [
    (schedule, ranks, virtual, count)
    for schedule in ORDERED
    for ranks in (2, 3, 4, 6)
    for virtual in virtual_counts(schedule)
    for count in (1, 2, 3, 4, 6, 7, 8, 12, 16)
    if SCHEDULES[schedule].allows(ranks, count)
]


def their_schedule(schedule: str, ranks: int, virtual: int, count: int) -> Any:
    """Torch's schedule, made of stages that only know their place."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * virtual, group_size=ranks, group_rank=0, stage_index=index, submod=None
        )
        for index in range(virtual)
    ]
    return CLASSES[schedule](stages[0] if SCHEDULES[schedule].stages == 1 else stages, count)


def rank_of(schedule: str, ranks: int, stage: int) -> int:
    return SCHEDULES[schedule].rank_of(stage, ranks)


def compute_order(schedule: str, rank: int, ranks: int, count: int, virtual: int = 1) -> list[Action]:
    return list(SCHEDULES[schedule].computed(rank, ranks, count, virtual))


def flat(order: list[Any]) -> list[Any]:
    """Without idle slots; what torch overlaps, one after the other."""
    found: list[Any] = []
    for action in order:
        if action is not None:
            found += action.sub_actions or [action]
    return found


@pytest.mark.parametrize("schedule", CLASSES)
def test_ranks_compute_in_torchs_order(schedule: str) -> None:
    for name, ranks, virtual, count in GRID:
        if name != schedule:
            continue
        their = their_schedule(schedule, ranks, virtual, count)
        for rank in range(ranks):
            if schedule == "1f1b" and rank == ranks - 1:
                continue  # torch's list for the last rank skips micro-batch 0; what it runs does not
            expected = [
                Action(KINDS[a.computation_type.value], a.stage_index, a.microbatch_index)  # type: ignore[arg-type]
                for a in flat(their.pipeline_order[rank])
                if a.computation_type.value in KINDS
            ]
            assert compute_order(schedule, rank, ranks, count, virtual) == expected, (ranks, virtual, count)


@pytest.mark.parametrize("schedule", ORDERED)
def test_torchs_simulation_gets_to_the_end(schedule: str) -> None:
    """It raises where a message is missing or comes too late for the computation that needs it."""
    letters = {kind: letter for letter, kind in (KINDS | MESSAGES).items()}
    for name, ranks, virtual, count in GRID:
        if name != schedule:
            continue
        rows = SCHEDULES[schedule].actions(ranks, count, virtual)
        theirs_too = {
            rank: [
                theirs._Action.from_str(f"{a.stage}{letters[a.kind]}{a.micro_batch}")
                for a in row
                if a.kind != "reduce"
            ]
            for rank, row in enumerate(rows)
        }
        stages = ranks * len(SCHEDULES[schedule].stages_of(0, ranks, virtual))
        theirs._simulate_comms_compute(theirs_too, partial(rank_of, schedule, ranks), stages)


@pytest.mark.parametrize("schedule", ORDERED)
def test_every_stage_does_everything_once(schedule: str) -> None:
    for name, ranks, virtual, count in GRID:
        if name != schedule:
            continue
        rows = SCHEDULES[schedule].actions(ranks, count, virtual)
        done = Counter(action for row in rows for action in row)
        assert set(done.values()) == {1}
        for rank, row in enumerate(rows):
            own = SCHEDULES[schedule].stages_of(rank, ranks, virtual)
            assert {a.stage for a in row} == set(own)
            assert all(rank_of(schedule, ranks, stage) == rank for stage in own)
            for stage in own:
                per_kind = Counter(a.kind for a in row if a.stage == stage)
                assert per_kind["forward"] == count
                assert per_kind["backward"] + per_kind["backward-input"] == count
                assert per_kind["backward-input"] == per_kind["backward-weight"]
                last = [a.kind for a in row if a.stage == stage and "send" not in a.kind][-1]
                assert last == "reduce"


@pytest.mark.parametrize("schedule", ORDERED)
def test_two_ranks_name_their_messages_in_the_same_order(schedule: str) -> None:
    """Over one connection a message can only be met by its counterpart: otherwise both would wait."""
    for name, ranks, virtual, count in GRID:
        if name != schedule:
            continue
        between: dict[tuple[int, int], list[list[Any]]] = {}
        for rank, row in enumerate(SCHEDULES[schedule].actions(ranks, count, virtual)):
            for kind, stage, number in row:
                if "-activation" not in kind and "-gradient" not in kind:
                    continue
                what = kind.partition("-")[2]
                step = 1 if what == "activation" else -1
                other_stage = stage + step if kind.startswith("send") else stage - step
                other = rank_of(schedule, ranks, other_stage)
                assert other != rank
                source = stage if kind.startswith("send") else other_stage
                pair = (min(rank, other), max(rank, other))
                between.setdefault(pair, [[], []])[rank > other].append((what, source, number))
        assert all(one == other for one, other in between.values())


def test_naive_keeps_one_micro_batch_at_a_time() -> None:
    order = compute_order("naive", 0, 2, 3)
    assert [(a.kind, a.micro_batch) for a in order] == [
        (kind, number) for number in range(3) for kind in ("forward", "backward")
    ]


def test_the_last_rank_of_1f1b_alternates_from_the_first_micro_batch_on() -> None:
    order = compute_order("1f1b", 1, 2, 3)
    assert [(a.kind, a.micro_batch) for a in order] == [
        (kind, number) for number in range(3) for kind in ("forward", "backward")
    ]


@pytest.mark.parametrize("schedule", CLASSES)
def test_what_we_refuse_torch_refuses(schedule: str) -> None:
    row = SCHEDULES[schedule]
    for ranks in (2, 3, 4):
        for count in range(1, 14):
            try:
                their_schedule(schedule, ranks, row.usual_stages, count)
                possible = True
            except ValueError:
                possible = False
            assert row.allows(ranks, count) == possible, (ranks, count)
        assert row.allows(ranks, row.fewest(ranks))


def test_zb_h1_is_the_zero_bubble_schedule_with_one_stage_a_rank() -> None:
    for ranks in (2, 3, 4):
        for count in (ranks, 2 * ranks, 4 * ranks):
            for rank in range(ranks):
                torchs = compute_order("zero-bubble", rank, ranks, count, 1)
                assert compute_order("zb-h1", rank, ranks, count) == torchs


def test_zb_h2_warms_up_with_nearly_twice_as_many() -> None:
    """Written out for 4 ranks and 8 micro-batches: 2p - 1 forwards first, and all weight halves late."""
    letters = {"forward": "f", "backward-input": "b", "backward-weight": "w"}
    rows = ["".join(letters[a.kind] for a in compute_order("zb-h2", rank, 4, 8)) for rank in range(4)]
    assert rows == [
        "fffffffbwfbwbwbwbwbwbwbw",
        "fffffbfbfbwfbwbwbwbwbwww",
        "fffbfbfbfbfbwfbwbwbwwwww",
        "fbfbfbfbfbfbfbwfbwwwwwww",
    ]


def test_an_undefined_count_is_refused() -> None:
    with pytest.raises(ValueError, match="3 micro-batches on 4 ranks"):
        SCHEDULES["1f1b"].actions(4, 3)
