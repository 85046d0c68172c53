"""A schedule is one row: a toy one, added here, is trained, accounted, simulated and planned at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.config import Job, load
from fivefold.hardware.cluster import find_cluster
from fivefold.models.presets import PRESETS
from fivefold.planner.answer import Answer
from fivefold.planner.memory.moments import in_flight
from fivefold.planner.search.best import search
from fivefold.planner.search.candidates import Choices
from fivefold.problems import BadInput
from fivefold.replay.account import account
from fivefold.schedules import ALONE, SCHEDULES, Action, Schedule
from fivefold.training.ranks import run_ranks
from fivefold.verification import gradient_error
from tests.axes.test_account_splits import difference, third_step
from tests.cases import Case, gradients
from tests.planner.goals import goal_for
from tests.planner.test_memory import most_kept

RUNNER = CliRunner()


def in_pairs(rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
    """Two micro-batches forward, then both back, weights after inputs; then the next two."""
    for first in range(0, count, 2):
        pair = range(first, min(first + 2, count))
        yield from (Action("forward", stage, number) for stage in own for number in pair)
        for stage in reversed(own):
            yield from (Action("backward-input", stage, number) for number in pair)
            yield from (Action("backward-weight", stage, number) for number in pair)


def toy() -> Schedule:
    return Schedule("toy", "two by two", in_pairs, stages=2)


@pytest.fixture
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "toy", toy())


def toy_job(**training: Any) -> Job:
    layout = {"pp": 2, "schedule": "toy", "dp_replicate": 1, "dp_shard": 1, "bucket_mb": 0.02}
    return Case("toy", 2, layout, {"micro_batch": 1} | training).job()


def on_ranks(world: Any, jobs: list[Job]) -> tuple[dict[str, Any], dict[str, Any]]:
    """On a rank, which is a process of its own, the row is added there too."""
    SCHEDULES["toy"] = toy()
    exact, counted = jobs
    return gradients(exact, steps=2), third_step(counted)


@pytest.mark.usefixtures("_known")
def test_it_trains_and_sends_what_the_ledger_says() -> None:
    exact, counted = toy_job(), toy_job(precision="fp32")
    alone = gradients(Case("one process", 1, {}).job(), steps=2)
    found = run_ranks(on_ranks, 2, [exact, counted])
    assert gradient_error(found[0][0]["gradients"], alone["gradients"])[0] <= 1e-11
    for trained, sent in found:
        for step, same in zip(trained["curve"], alone["curve"], strict=True):
            assert step == pytest.approx(same, rel=1e-9)
        expected = account(counted, sent["place"]).traffic()
        assert sent["traffic"] == expected, difference(sent["traffic"], expected)


@pytest.mark.usefixtures("_known")
def test_it_is_simulated_alone_and_in_a_job() -> None:
    times = "--forward 1 --backward-input 1 --backward-weight 1"
    words = f"simulate --schedule toy --stages 2 --micro-batches 6 {times} --json"
    found = json.loads(RUNNER.invoke(app, words.split()).stdout)
    assert found["peak_in_flight"] == [2, 2]
    job = "--layout.pp 2 --layout.schedule toy --training.micro_batch 1 --training.global_batch 32"
    answer = RUNNER.invoke(app, f"simulate --preset llama3.2-1b --gpus 8 {job} --json".split())
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["peak_in_flight"] == [2, 2]


@pytest.mark.usefixtures("_known")
def test_it_is_planned() -> None:
    goal, cluster = goal_for(PRESETS["llama3.2-1b"], 4, global_batch=16), find_cluster("dgx-h100")
    best = Answer(goal, cluster).best_with({"schedule": "toy", "zero": 0}).best
    assert {planned.setup.schedule for planned in best} == {"toy"}
    few = Choices(zero=(0,), recompute=("none",), cp_kind=())
    with_it = search(goal, cluster, choices=few)
    assert with_it.best
    del SCHEDULES["toy"]
    without = search(goal, cluster, choices=few)
    assert with_it.bounded > without.bounded


@pytest.mark.usefixtures("_known")
def test_what_it_keeps_is_counted_in_its_order() -> None:
    for ranks in (2, 4):
        for count in (1, 3, 40):
            for rank in range(ranks):
                order = list(SCHEDULES["toy"].computed(rank, ranks, count, 2))
                assert in_flight("toy", ranks, rank, count, 2) == most_kept(order)[0]


def test_without_its_row_nobody_knows_it() -> None:
    with pytest.raises(BadInput, match="'toy' is not known\n    Allowed: one of naive, gpipe, "):
        load(None, None, ["--layout.pp=2", "--layout.schedule=toy"])


def forgets_weights(rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
    return (action for action in in_pairs(rank, ranks, count, own) if action.kind != "backward-weight")


def back_before_forth(rank: int, ranks: int, count: int, own: list[int]) -> Iterator[Action]:
    """The first rank waits for gradients of what it has not sent."""
    for number in range(count):
        there, back = Action("forward", own[0], number), Action("backward", own[0], number)
        yield from (back, there) if rank == 0 else (there, back)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"what": ""}, "no line on what it is"),
        ({"order": None}, "needs an order"),
        ({"memory_limit": 1}, "needs an order; or to search"),
        ({"shape": "v", "stages": 1}, "shape 'v' with 1 stages"),
        ({"shape": "circle"}, "shape 'circle'"),
        ({"order": forgets_weights}, "stage 0 does not run micro-batch 0 forward and backward once"),
        ({"order": back_before_forth, "stages": 1}, "circle"),
    ],
)
def test_a_row_with_missing_or_contradictory_facts_is_refused(facts: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"what": "two by two", "order": in_pairs, "stages": 2}
    with pytest.raises(ValueError, match=f"schedule 'toy': .*{words}"):
        Schedule("toy", **(given | facts))


def test_no_row_of_the_table_contradicts_itself() -> None:
    """They are taken as proven there: jobs are read without trying their orders out."""
    wrong = {schedule.name: schedule.contradiction() for schedule in (ALONE, *SCHEDULES.values())}
    assert {name: words for name, words in wrong.items() if words} == {}
