"""What `plan` answers: why not otherwise, what rules of thumb say, what would fit, and how many devices."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.axes.checks import check
from fivefold.axes.layout import Place
from fivefold.config import Job, dump_toml, resolve
from fivefold.hardware.cluster import find_cluster, write_cluster
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameter_count
from fivefold.models.presets import PRESETS
from fivefold.planner.answer import STEPS, Answer, fewest, steps_between
from fivefold.planner.goal import usual_batch
from fivefold.planner.keys import read_given
from fivefold.planner.memory.fullest_rank import GIB, counted_on, memory
from fivefold.planner.play.step_time import Breakdown
from fivefold.planner.recipe import RULES, chosen_by_recipe, recipe
from fivefold.planner.request import Request
from fivefold.planner.search.best import search
from fivefold.planner.why import losses, rescues, why
from fivefold.problems import BadInput
from fivefold.replay.account import account
from fivefold.report.plan_text import columns, spent
from tests.planner.durations import seconds
from tests.planner.goals import goal_for

H100 = find_cluster("dgx-h100")


@pytest.fixture(scope="module")
def eight() -> Answer:
    return Answer(goal_for(PRESETS["llama3-8b"], 8, global_batch=32), H100, tokens=1e9, price=2.0)


ONE_STAGE = {"layout.pp": 1, "layout.cp": 1}
"""For searches of which only the answer's form is of interest."""


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
    assert row["memory_gib"] < counted_on(H100) < 80


def test_without_tokens_or_price_there_are_no_days_and_no_cost(eight: Answer) -> None:
    assert eight.best is not None
    row = Answer(eight.goal, eight.cluster).row(eight.best)
    assert row["days"] is row["cost"] is None


def test_why_not_a_slower_layout(eight: Answer) -> None:
    reason = why({"tp": 8}, eight)
    assert reason.verdict == "slower"
    most = max(reason.figures["lost_s"], key=lambda part: reason.figures["lost_s"][part])
    assert most == "exposed tp messages"
    assert re.search(rf"it loses [\d.]+% to {most}", reason.sentence)
    assert reason.figures["step_time_s"] > reason.figures["best_step_time_s"]
    assert any("tp=" in remedy for remedy in reason.remedies)


def test_what_is_lost_adds_up(eight: Answer) -> None:
    best, other = eight.best, eight.best_with({"tp": 8}).best[0]
    assert best is not None
    lost = sum(losses(other, best).values())
    assert lost == pytest.approx(other.step_time - best.step_time, rel=1e-6)


def test_why_not_one_that_does_not_fit(eight: Answer) -> None:
    reason = why({"zero": 0, "tp": 1, "pp": 1, "cp": 1}, eight)
    assert reason.verdict == "does not fit"
    assert "GiB more on stage 0" in reason.sentence
    parts = reason.figures["parts_gib"]
    assert max(parts, key=lambda part: parts[part]) == "states"
    assert f"are optimizer states ({parts['states']:.1f} GiB)" in reason.sentence
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
    asked = request(gpus="1")
    found = asked.answer()
    assert found.best is None
    told = asked.nearest(found)
    assert told["over_gib"] > 0
    assert "GiB more" in told["sentence"]
    assert any(remedy.startswith("With --gpus 2:") for remedy in told["remedies"])


def test_a_number_of_devices_that_nothing_divides_is_explained() -> None:
    asked = request(model="llama3-8b", gpus="67", global_batch=64)
    found = asked.answer()
    assert found.best is None
    told = asked.nearest(found)
    assert "67 devices" in told["sentence"]
    assert any("--global-batch 67" in remedy for remedy in told["remedies"])


@pytest.mark.parametrize("enough", [1, 5, 8, 104, 1000])
def test_the_fewest_devices_are_found_between_round_numbers(enough: int) -> None:
    """Whole servers, or a part of one; between round numbers not each is tried."""

    def found(gpus: int) -> Any:
        return SimpleNamespace(best=gpus, gpus=gpus)

    def late(answer: Any) -> bool:
        return bool(answer.gpus < enough)

    gpus: Any = fewest(H100, found, late).best
    assert enough <= gpus < enough + 8 * (1 + enough // 128)


@pytest.mark.slow
def test_the_fewest_devices_that_make_a_deadline() -> None:
    asked = request(gpus="auto", tokens="20B", deadline=3, global_batch=256)
    found = asked.answer()
    assert found.best is not None
    assert asked.late(found) is None
    fewer = asked.answer_for(found.goal.gpus // 2)
    assert fewer.best is None or asked.late(fewer)


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
    free = request(keys=ONE_STAGE)
    found = free.answer()
    assert found.best is not None
    assert found.best.setup.compile
    assert found.row(found.best)["training"]["compile"] is True
    assert "compile = true" in dump_toml(free.job(found))
    eager = replace(found.best.setup, compile=False)
    assert seconds(eager, found.cluster) > found.best.step_time
    assert float(memory(eager, found.cluster).device) > float(found.best.memory.device)


def test_nothing_is_compiled_where_nobody_wants_it() -> None:
    asked = request(compile=False, keys=ONE_STAGE)
    assert not any(planned.setup.compile for planned in asked.answer().searched.best)
    on_a_laptop = request(model="tiny", cluster="laptop", gpus="2")
    assert not any(planned.setup.compile for planned in on_a_laptop.answer().searched.best)


def test_all_is_compiled_where_it_is_asked_for() -> None:
    asked = request(compile=True, keys=ONE_STAGE)
    found = asked.answer().searched
    assert all(planned.setup.compile for planned in (*found.best, *found.front))


def test_whoever_names_a_schedule_wants_a_pipeline(eight: Answer) -> None:
    reason = why({"schedule": "gpipe"}, eight)
    assert "pp=" in reason.sentence
    assert "schedule=gpipe" in reason.sentence


def test_the_written_job_names_its_cluster(tmp_path: Path) -> None:
    asked = request(cluster="dgx-b200", keys=ONE_STAGE)
    assert tomllib.loads(dump_toml(asked.job(asked.answer())))["cluster"] == {"preset": "dgx-b200"}
    file = tmp_path / "mine.toml"
    write_cluster(replace(H100, name="mine"), str(file))
    asked = request(cluster=str(file), keys=ONE_STAGE)
    assert tomllib.loads(dump_toml(asked.job(asked.answer())))["cluster"] == {"file": str(file)}


def test_a_deadline_needs_something_to_be_done_by_it() -> None:
    with pytest.raises(BadInput, match="--deadline: is given without --tokens"):
        request(deadline=14.0)


@pytest.mark.parametrize(("gpus", "batch"), [(8, 512), (7, 518), (72, 576), (1000, 1000), (16384, 2048)])
def test_the_usual_batch_divides_over_the_devices(gpus: int, batch: int) -> None:
    assert usual_batch(PRESETS["llama3-8b"], 8192, gpus) == batch


@pytest.mark.parametrize(
    ("few", "many", "expected"), [(96, 128, [104, 112, 120]), (4, 8, []), (64, 96, [72, 80, 88])]
)
def test_whole_servers_between_two_numbers(few: int, many: int, expected: list[int]) -> None:
    assert steps_between(few, many, 8) == expected
    assert len(steps_between(8192, 16384, 8)) <= STEPS


# --- where the time goes -----------------------------------------------------------------------------------


def test_where_the_time_goes_adds_up_to_the_step(eight: Answer) -> None:
    rows = eight.as_json()["best"]
    assert len(rows) > 1
    for row in rows:
        parts = row["breakdown"]
        assert set(parts) == {"compute_s", "bubble_s", "optimizer_s", "exposed_s"}
        exposed = sum(parts["exposed_s"].values())
        seconds = parts["compute_s"] + parts["bubble_s"] + parts["optimizer_s"] + exposed
        assert seconds == pytest.approx(row["step_time_s"], rel=1e-9)
        assert parts["compute_s"] > 0.5 * seconds


def test_the_line_leaves_out_what_is_nothing(eight: Answer) -> None:
    assert eight.best is not None
    parts = Breakdown(10.0, 8.0, 1.4957, 0.0043, {"tp": 0.5, "pp": 0.0})
    vars(eight.best)["breakdown"] = parts
    try:
        assert spent(eight.best) == (
            "of its 10 s the fastest spends: compute 8 s (80.0%), bubble 1.5 s (15.0%), "
            "exposed tp messages 0.5 s (5.0%)"
        )
    finally:
        del vars(eight.best)["breakdown"]


# --- keys that are fixed -----------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"model": "tiny", "cluster": "laptop", "gpus": "4"}


def test_fixed_keys_are_those_of_every_layout() -> None:
    asked = request(
        **SMALL,
        keys={
            "layout.tp": 2,
            "layout.zero": 1,
            "training.recompute": "full",
            "training.micro_batch": 2,
            "training.loss_chunk": 64,
            "layout.sequence_parallel": False,
            "layout.bucket_mb": 50.0,
            "optimizer.name": "sgd",
            "optimizer.lr": 0.5,
        },
    )
    found = asked.answer()
    planned = [*found.searched.best, *found.searched.front]
    assert planned
    for each in planned:
        setup = each.setup
        assert (setup.tp, setup.zero, setup.recompute, setup.micro_batch) == (2, 1, "full", 2)
        assert (setup.sequence_parallel, setup.bucket_mb, setup.optimizer) == (False, 50.0, "sgd")
        assert setup.loss_chunk == 64
    job = asked.job(found)
    assert (job.layout.tp, job.layout.bucket_mb, job.training.micro_batch) == (2, 50.0, 2)
    assert job.training.loss_chunk == 64
    assert (job.optimizer.name, job.optimizer.lr, job.model.preset) == ("sgd", 0.5, "tiny")
    assert Setup.of(resolve(job, 4)) == planned[0].setup


def test_smaller_states_are_planned_for() -> None:
    kinds = ("fp32", "bf16", "int8")
    asked = [request(**SMALL, keys={"optimizer.states": states}) for states in kinds]
    found = [each.answer().best for each in asked]
    for states, one, narrower in zip(kinds[1:], found, found[1:], strict=False):
        assert one is not None
        assert narrower is not None
        assert narrower.setup.states == states
        assert narrower.memory_gib < one.memory_gib
        assert narrower.step_time < one.step_time
    assert asked[2].job(asked[2].answer()).optimizer.states == "int8"


def test_states_in_host_memory_are_planned_for_where_the_user_says_so() -> None:
    asked = [request(gpus="2", keys={"optimizer.offload": offload}) for offload in (False, True)]
    plain, hosted = (each.answer() for each in asked)
    assert hosted.best is not None
    assert hosted.best.setup.offload
    row = hosted.row(hosted.best)
    assert row["optimizer"] == {"offload": True}
    job = resolve(asked[1].job(hosted), 2, "cuda")
    ledger = account(job, Place(pp=int(hosted.best.memory.number)))
    assert row["host_gib"] == pytest.approx(ledger.on_host / GIB)
    assert ledger.on_host > 20 * GIB
    assert "host GiB" in columns(hosted, [hosted.best])[0]
    assert asked[1].job(hosted).optimizer.offload
    assert all(not each.setup.offload for each in plain.searched.best)
    if plain.best is not None:
        assert "host_gib" not in plain.row(plain.best)
        assert "host GiB" not in columns(plain, [plain.best])[0]


def test_where_nothing_fits_states_in_host_memory_are_proposed() -> None:
    asked = request(gpus="1")
    found = asked.answer()
    assert found.best is None
    told = asked.nearest(found)["remedies"]
    line = next(line for line in told if line.startswith("With --optimizer.offload true: "))
    with_it = request(gpus="1", keys={"optimizer.offload": True}).answer()
    assert with_it.best is not None
    assert f"{with_it.best.memory_gib:.1f} GiB" in line


def test_the_states_that_make_room_are_named_where_nothing_fits() -> None:
    goal = goal_for(PRESETS["llama3.2-1b"], 1, global_batch=1)
    fullest = [
        Answer(goal.changed(states=states), H100).best_with({"recompute": "full"}).best[0].memory_gib
        for states in ("bf16", "int8")
    ]
    between = sum(fullest) / 2 / counted_on(H100)
    device = replace(H100.device, memory_gib=H100.device.memory_gib * between)
    lines = rescues(Answer(goal, replace(H100, device=device)), lambda gpus: replace(goal, gpus=gpus))
    told = [line for line in lines if "optimizer.states" in line]
    assert len(told) == 1
    assert told[0].startswith("With --optimizer.states int8: ")


@pytest.mark.parametrize("states", ["bf16", "int8"])
@pytest.mark.parametrize("keys", [{"optimizer.name": "sgd"}, {"training.precision": "fp64"}])
def test_states_that_no_job_can_have_are_refused(keys: dict[str, Any], states: str) -> None:
    with pytest.raises(BadInput, match=rf"optimizer\.states: '{states}' under "):
        request(**SMALL, keys={"optimizer.states": states} | keys)


def test_whoever_says_how_an_axis_works_gets_the_axis() -> None:
    asked = request(**SMALL, keys={"layout.virtual_stages": 1})
    found = asked.answer()
    assert all(each.setup.pp > 1 for each in found.searched.best)
    assert check(resolve(asked.job(found), 4)) == []


def test_nothing_better_is_missed_where_keys_are_fixed() -> None:
    every = search(request(**SMALL).goal(4), find_cluster("laptop"), best=1000)
    for tp in (1, 2):
        best = min(each.step_time for each in every.best if each.setup.tp == tp)
        found = request(**SMALL, keys={"layout.tp": tp}).answer().best
        assert found is not None
        assert found.step_time == pytest.approx(best)


def test_a_key_is_as_good_as_its_option() -> None:
    options = request(**SMALL, seq_len=512, global_batch=16, precision="bf16", compile=True)
    keys = {"seq_len": 512, "global_batch": 16, "precision": "bf16", "compile": True}
    by_key = request(
        **SMALL | {"model": None},
        keys={"model.preset": "tiny"} | {f"training.{key}": value for key, value in keys.items()},
    )
    assert options.goal(4) == by_key.goal(4)
    assert options.goal(4).setup.compile
    assert options.fixed == by_key.fixed == {}


def test_a_longer_model_takes_longer_sequences() -> None:
    asked = request(keys={"model.max_seq_len": 32768}, seq_len=32768, gpus="64")
    assert (asked.asked.spec.max_seq_len, asked.goal(64).setup.seq_len) == (32768, 32768)
    with pytest.raises(BadInput, match=r"raise model\.max_seq_len"):
        request(seq_len=32768)


@pytest.mark.parametrize(
    ("given", "both"),
    [
        ({"seq_len": 64, "keys": {"training.seq_len": 64}}, ("--seq-len", "--training.seq_len")),
        (
            {"global_batch": 8, "keys": {"training.global_batch": 8}},
            ("--global-batch", "--training.global_batch"),
        ),
        (
            {"precision": "fp32", "keys": {"training.precision": "fp32"}},
            ("--precision", "--training.precision"),
        ),
        ({"compile": False, "keys": {"training.compile": False}}, ("--compile", "--training.compile")),
        ({"keys": {"model.preset": "tiny"}}, ("--model", "--model.preset")),
        ({"keys": {"model.hf": "config.json"}}, ("--model", "--model.hf")),
        ({"hf": "config.json"}, ("--model", "--hf")),
    ],
)
def test_what_is_given_twice_is_refused_by_both_names(given: dict[str, Any], both: tuple[str, str]) -> None:
    with pytest.raises(BadInput) as caught:
        request(**SMALL | given)
    (problem,) = caught.value.problems
    assert (problem.key, problem.message) == (both[0], f"given together with {both[1]}")


@pytest.mark.parametrize(
    ("keys", "key", "said"),
    [
        ({"data.source": "random"}, "data.source", "'random': a plan does not depend on it Allowed: model.*"),
        ({"checkpoint.every": 5}, "checkpoint.every", "5: a plan does not depend on it"),
        ({"training.clip": 1.0}, "training.clip", "training.micro_batch, training.seq_len"),
        ({"layout.auto": True}, "layout.auto", "a plan does not depend on it"),
        ({"training.steps": 5}, "training.steps", "Use --tokens."),
        ({"cluster.preset": "laptop"}, "cluster.preset", "Use --cluster."),
        ({"model.module": "a.py:Net"}, "model.module", "a model of your own"),
        ({"layout.tp": 0}, "layout.tp", "0 is out of range Allowed: an integer, at least 1."),
        ({"layout.tpp": 2}, "layout.tpp", "Did you mean 'tp'?"),
        ({"laiout.tp": 2}, "laiout", "Did you mean 'layout'?"),
        ({"optimizer.name": "adam"}, "optimizer.name", "Did you mean 'adamw'?"),
        ({"model.kv_heads": 3}, "model", "does not divide heads"),
    ],
)
def test_keys_are_judged_by_the_jobs_own_rules(keys: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        request(**SMALL, keys=keys, why="tp=2")
    (problem,) = caught.value.problems
    assert problem.key == key
    assert said in f"{problem.message} {problem.hint}"


def test_keys_that_no_layout_can_have_are_refused_in_the_words_of_the_axes() -> None:
    with pytest.raises(BadInput, match=r"3 ranks cannot share model\.heads") as caught:
        request(keys={"layout.tp": 3}).answer()
    assert "--" not in str(caught.value)
    with pytest.raises(BadInput, match="tp 8 x pp 2 makes 16, but there are 8 ranks\n    Use --gpus 16"):
        request(keys={"layout.tp": 8, "layout.pp": 2}).answer()
    fixed = {"communication.compress": "int8", "communication.compress_on": "replicate"}
    with pytest.raises(BadInput, match=r"'replicate', but layout\.dp_replicate is 1"):
        request(**SMALL, keys=fixed | {"layout.dp_replicate": 1}).answer()


def test_where_fixed_keys_do_not_fit_letting_go_of_one_is_tried() -> None:
    asked = request(gpus="2", keys={"layout.zero": 0})
    told = asked.nearest(asked.answer())["remedies"]
    assert told[0].startswith("With --gpus 4: ")
    assert told[-1].startswith("Without zero=0: ")


def test_why_asks_within_what_is_fixed() -> None:
    asked = request(**SMALL, keys={"layout.zero": 1}, why="tp=2")
    reason = why(asked.given, asked.answer())
    assert reason.verdict == "slower"
    assert "zero=1" in reason.sentence.split(" takes ")[0]
    with pytest.raises(BadInput, match=r"--why: tp=4, but --layout\.tp fixes it"):
        request(**SMALL, keys={"layout.tp": 2}, why="tp=4")


# --- refusals ----------------------------------------------------------------------------------------------


def test_an_impossible_layout_names_only_options_of_plan(eight: Answer) -> None:
    reason = why({"tp": 8, "pp": 2}, eight)
    assert reason.verdict == "impossible"
    assert reason.remedies == ["Use --gpus 16."]


def test_no_sequence_is_named_that_the_model_does_not_take() -> None:
    goal = goal_for(PRESETS["tiny"], 8, seq_len=1020, global_batch=8)
    found = Answer(goal, H100)
    assert why({"cp": 8, "cp_kind": "ring"}, found).remedies == ["Use training.seq_len = 1008 or 1024."]
    short = Answer(goal.changed(spec=PRESETS["tiny"].model_copy(update={"max_seq_len": 1020})), H100)
    assert why({"cp": 8, "cp_kind": "ring"}, short).remedies == ["Use training.seq_len = 1008."]


def test_a_device_without_a_peak_for_the_precision_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    device = replace(H100.device, name="mine", peak_flops={"float16": 1e14, "float32": 1e13})
    write_cluster(replace(H100, name="mine", device=device), str(file))
    with pytest.raises(BadInput) as caught:
        request(cluster=str(file))
    (problem,) = caught.value.problems
    assert problem.key == f"{file}: device.peak_flops"
    assert problem.message == "a mine has none for bfloat16, and bf16 is planned for"
    assert (
        "device.peak_flops.bfloat16 (FLOP/s, above 0), --precision fp32 or --precision fp16" in problem.hint
    )
    assert request(cluster=str(file), precision="fp16").asked.spec == PRESETS["llama3-8b"]
