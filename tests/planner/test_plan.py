"""What `plan` answers: why not otherwise, what rules of thumb say, what would fit, and how many devices."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.axes.checks import check
from fivefold.config import Job, dump_toml, resolve
from fivefold.hardware.cluster import find_cluster, write_cluster
from fivefold.models.inventory import parameter_count
from fivefold.models.presets import PRESETS
from fivefold.planner.answer import Answer, answer
from fivefold.planner.fewest import STEPS, steps_between
from fivefold.planner.goal import goal_for, usual_batch
from fivefold.planner.memory.fullest_rank import counted_on, memory
from fivefold.planner.play.one_layout import simulated_step
from fivefold.planner.recipe import RULES, chosen_by_recipe, recipe
from fivefold.planner.request import Request
from fivefold.planner.search.best import GIB
from fivefold.planner.search.partial import best_with, read_given
from fivefold.planner.why import losses, why
from fivefold.problems import BadInput

H100 = find_cluster("dgx-h100")


@pytest.fixture(scope="module")
def eight() -> Answer:
    return answer(goal_for(PRESETS["llama3-8b"], 8, global_batch=32), H100, tokens=1e9, price=2.0)


def request(**given: Any) -> Request:
    return Request(**{"model": "llama3-8b", "hf": None, "cluster": "dgx-h100", "gpus": "8"} | given)


def test_time_money_and_mfu_follow_from_the_step(eight: Answer) -> None:
    best = eight.best
    assert best is not None
    row = eight.row(best)
    steps = 1e9 / (32 * 8192)
    assert row["days"] == pytest.approx(steps * best.step_time / 86400)
    assert row["cost"] == pytest.approx(row["days"] * 24 * 8 * 2.0)
    assert row["tokens_per_s_per_gpu"] == pytest.approx(32 * 8192 / best.step_time / 8)
    flops = 6 * (parameter_count(PRESETS["llama3-8b"]) - 128256 * 4096) + 6 * 32 * 4096 * 8192
    assert row["mfu"] == pytest.approx(flops * row["tokens_per_s_per_gpu"] / 989.4e12, rel=0.01)
    assert 0.2 < row["mfu"] < 0.7
    assert row["memory_gib"] < counted_on(best.memory, H100) < 80


def test_without_tokens_or_price_there_are_no_days_and_no_cost(eight: Answer) -> None:
    bare = Answer(eight.goal, eight.cluster, eight.searched)
    assert bare.best is not None
    assert bare.row(bare.best)["days"] is bare.row(bare.best)["cost"] is None


def test_why_not_a_slower_layout(eight: Answer) -> None:
    reason = why({"tp": 8}, eight)
    assert reason.verdict == "slower"
    assert "exposed tp messages" in reason.sentence
    assert reason.figures["step_time_s"] > reason.figures["best_step_time_s"]
    assert any("tp=" in remedy for remedy in reason.remedies)


def test_what_is_lost_adds_up(eight: Answer) -> None:
    best, other = eight.best, best_with({"tp": 8}, eight.goal, H100).best[0]
    assert best is not None
    lost = sum(losses(other, best).values())
    assert lost == pytest.approx(float(other.estimate.step_time) - float(best.estimate.step_time), rel=1e-6)


def test_why_not_one_that_does_not_fit(eight: Answer) -> None:
    reason = why({"zero": 0, "tp": 1, "pp": 1, "cp": 1}, eight)
    assert reason.verdict == "does not fit"
    assert "GiB more on stage 0" in reason.sentence
    assert reason.figures["over_gib"] > 0
    assert reason.remedies


@pytest.mark.parametrize("given", [{"zero": 2, "pp": 2}, {"zero": 3, "pp": 2, "schedule": "zbv"}])
def test_a_stage_that_runs_like_another_is_still_answered_for(eight: Answer, given: dict[str, Any]) -> None:
    reason = why(given, eight)
    assert reason.verdict in ("best", "slower")
    assert f"zero={given['zero']}" in reason.sentence


def test_why_not_an_impossible_one(eight: Answer) -> None:
    reason = why({"tp": 3}, eight)
    assert reason.verdict == "impossible"
    assert "3" in reason.sentence


def test_why_not_the_best(eight: Answer) -> None:
    assert eight.best is not None
    keys = eight.row(eight.best)
    given = {k: v for k, v in {**keys["layout"], **keys["training"]}.items() if k != "sequence_parallel"}
    assert why(given, eight).verdict == "best"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp", "has no value"),
        ("tpp=2", "Did you mean 'tp'"),
        ("dp=8", "dp_shard"),
        ("tp=0", "tp: 0 is out of range\n    Allowed: an integer, at least 1."),
        ("schedule=2f2b", "schedule: '2f2b' is not known\n    Allowed: one of naive, gpipe"),
        ("recompute=some", "recompute: 'some'"),
        ("tp=8,tp=4", "'tp' is given twice"),
        ("tp=8 pp=4", "tp: '8 pp=4'"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_given(text, "--why")
    assert said in str(caught.value)


def test_a_layout_may_be_written_in_a_jobs_words() -> None:
    assert read_given("layout.tp=8, training.micro_batch=2,schedule=1f1b", "--why") == {
        "tp": 8,
        "micro_batch": 2,
        "schedule": "1f1b",
    }


def test_the_recipe_has_every_rule_beside_the_search(eight: Answer) -> None:
    steps = recipe(eight)
    assert [step.rule for step in steps] == list(RULES)
    assert [step.asked for step in steps] == [False, True, True, False, False]
    assert "does not fit" in steps[0].says(eight)
    end = chosen_by_recipe(steps)
    assert end is not None
    assert end.searched.best[0].step_time >= steps[-1].searched.best[0].step_time * (1 - 1e-9)


def test_the_job_file_trains_as_planned(eight: Answer) -> None:
    text = dump_toml(request(global_batch=32).job(eight))
    job = resolve(Job.model_validate(tomllib.loads(text)), 8, "cuda")
    assert check(job) == []
    assert eight.best is not None
    assert job.layout.dp_shard == eight.row(eight.best)["layout"]["dp_shard"]
    assert job.training.steps == round(1e9 / (32 * 8192))


def test_where_nothing_fits_it_says_how_far_and_what_would() -> None:
    asked = request(model="llama3-70b", global_batch=64)
    found = asked.answer()
    assert found.best is None
    told = asked.nearest(found)
    assert told["over_gib"] > 0
    assert "GiB more" in told["sentence"]
    assert any(remedy.startswith("With --gpus") for remedy in told["remedies"])


def test_a_number_of_devices_that_nothing_divides_is_explained() -> None:
    asked = request(model="llama3-8b", gpus="67", global_batch=64)
    found = asked.answer()
    assert found.best is None
    told = asked.nearest(found)
    assert "67 devices" in told["sentence"]
    assert any("--global-batch 67" in remedy for remedy in told["remedies"])


@pytest.mark.slow
def test_the_fewest_devices_that_make_a_deadline() -> None:
    asked = request(gpus="auto", tokens="20B", deadline=3, global_batch=256)
    found = asked.answer()
    assert asked.in_time(found)
    fewer = asked.answer_for(found.goal.gpus // 2)
    assert not asked.in_time(fewer)


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        ({"model": "llama3-8c"}, "--model", "Did you mean 'llama3-8b'"),
        ({"model": None}, "--model", "--hf"),
        ({"cluster": "dgx-h10"}, "cluster", "Did you mean"),
        ({"gpus": "0"}, "--gpus", "1 to"),
        ({"gpus": "-8"}, "--gpus", "1 to"),
        ({"gpus": "many"}, "--gpus", "auto"),
        ({"gpus": "auto"}, "--gpus", "--deadline"),
        ({"seq_len": 0}, "--seq-len", "at least 1"),
        ({"seq_len": 10**9}, "--seq-len", "at most"),
        ({"global_batch": -1}, "--global-batch", "at least 1"),
        ({"tokens": "lots"}, "--tokens", ""),
        ({"price": -2.0}, "--price", "above 0"),
        ({"precision": "bf61"}, "--precision", "bf16"),
    ],
)
def test_bad_requests_are_refused_in_words(given: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        request(**given)
    (problem,) = caught.value.problems
    assert key in problem.key
    assert said in f"{problem.message} {problem.hint}"


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(BadInput) as caught:
        request(model="nope", gpus="0", price=0.0)
    assert len(caught.value.problems) == 3


def test_memory_is_what_the_device_sees(eight: Answer) -> None:
    for planned in eight.searched.best:
        assert eight.row(planned)["memory_gib"] == pytest.approx(float(planned.memory.device) / GIB)


def test_what_is_faster_compiled_is_compiled() -> None:
    free = request()
    found = free.answer()
    assert found.best is not None
    assert found.best.setup.compile
    assert found.row(found.best)["training"]["compile"] is True
    assert "compile = true" in dump_toml(free.job(found))
    eager = replace(found.best.setup, compile=False)
    assert simulated_step(eager, found.cluster) > found.best.step_time
    assert float(memory(eager, found.cluster).device) > float(found.best.memory.device)


def test_nothing_is_compiled_where_nobody_wants_it() -> None:
    asked = request(compile=False)
    assert not any(planned.setup.compile for planned in asked.answer().searched.best)
    on_a_laptop = request(model="tiny", cluster="laptop", gpus="2")
    assert not any(planned.setup.compile for planned in on_a_laptop.answer().searched.best)


def test_all_is_compiled_where_it_is_asked_for() -> None:
    asked = request(compile=True)
    found = asked.answer().searched
    assert all(planned.setup.compile for planned in (*found.best, *found.front))


def test_whoever_names_a_schedule_wants_a_pipeline(eight: Answer) -> None:
    reason = why({"schedule": "gpipe"}, eight)
    assert "pp=" in reason.sentence
    assert "schedule=gpipe" in reason.sentence


def test_the_written_job_names_its_cluster(tmp_path: Path) -> None:
    asked = request(cluster="dgx-b200")
    assert tomllib.loads(dump_toml(asked.job(asked.answer())))["cluster"] == {"preset": "dgx-b200"}
    file = tmp_path / "mine.toml"
    write_cluster(replace(H100, name="mine"), str(file))
    asked = request(cluster=str(file))
    assert tomllib.loads(dump_toml(asked.job(asked.answer())))["cluster"] == {"file": str(file)}


def test_a_deadline_needs_something_to_be_done_by_it() -> None:
    with pytest.raises(BadInput, match="--deadline: is given without --tokens"):
        request(deadline=14.0)


@pytest.mark.parametrize(("gpus", "batch"), [(8, 512), (7, 518), (72, 576), (1000, 1000), (16384, 2048)])
def test_the_usual_batch_divides_over_the_devices(gpus: int, batch: int) -> None:
    assert usual_batch(PRESETS["llama3-8b"], 8192, gpus) == batch


def test_the_next_number_of_devices_that_fits_is_named() -> None:
    asked = request(gpus="2")
    assert any("--gpus 4:" in remedy for remedy in asked.nearest(asked.answer())["remedies"])


@pytest.mark.parametrize(
    ("few", "many", "expected"), [(96, 128, [104, 112, 120]), (4, 8, []), (64, 96, [72, 80, 88])]
)
def test_whole_servers_between_two_numbers(few: int, many: int, expected: list[int]) -> None:
    assert steps_between(few, many, 8) == expected
    assert len(steps_between(8192, 16384, 8)) <= STEPS
