"""`--profile`, on real runs: which steps are recorded, what they leave behind, and that no number changes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.config import load
from fivefold.ledger.setup import Setup
from fivefold.planner.auto import cluster_of
from fivefold.planner.play.by_kind import by_kind
from fivefold.planner.time.parts import Costs
from fivefold.training.launch import train
from fivefold.training.metrics import read_metrics
from fivefold.training.profile import profile_problems, profiled_steps
from fivefold.training.recorder import Recorder
from fivefold.training.run import Summary
from fivefold.watch.kinds import KINDS
from fivefold.watch.trace import read
from tests.commands.typed import SMALL, typed

STEPS = ("--training.steps", "13")
ONE = ("--training.micro_batch", "1", "--cluster.preset", "laptop")


def trace_of(run: Path, rank: int) -> dict[str, Any]:
    with gzip.open(run / "profile" / f"rank-{rank}.json.gz", "rt") as file:
        told: dict[str, Any] = json.load(file)
    return told


def summary_of(run: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((run / "profile" / "summary.json").read_text())
    return told


def numbers(run: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(run)]


# --- which steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("done", "steps", "wanted"),
    [
        (0, 1000, [10, 11, 12]),
        (500, 1000, [510, 511, 512]),
        (0, 12, [10, 11, 12]),
        (0, 11, [9, 10, 11]),
        (0, 5, [3, 4, 5]),
        (0, 4, [3, 4]),
        (7, 10, [10]),
        (0, 2, []),
        (10, 10, []),
        (11, 10, []),
    ],
)
def test_the_tenth_to_the_twelfth_of_a_start_are_recorded(done: int, steps: int, wanted: list[int]) -> None:
    assert list(profiled_steps(done, steps)) == wanted
    assert bool(profile_problems(done, steps)) == (not wanted)


@given(st.integers(0, 50), st.integers(1, 80))
def test_two_steps_at_least_are_taken_before_and_none_behind_the_last(done: int, steps: int) -> None:
    found = profiled_steps(done, steps)
    assert len(found) <= 3
    if found:
        assert done + 3 <= found[0] <= found[-1] <= min(steps, done + 12)


# --- runs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One rank on a cluster that is named: how it ended, and the run's folder."""
    run = tmp_path_factory.mktemp("alone") / "run"
    return typed("train", *SMALL, *STEPS, *ONE, "--run", str(run), "--json", "--profile"), run


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks, with a validation between the steps that are recorded."""
    run = tmp_path_factory.mktemp("together") / "run"
    words = (*SMALL, *STEPS, *ONE, "--training.validate_every", "11")
    return typed("train", *words, "--nproc", "2", "--run", str(run), "--json", "--profile"), run


def test_a_rank_alone_tells_where_its_time_went(alone: Any) -> None:
    ended, run = alone
    assert ended.exit_code == 0, ended.stderr
    assert json.loads(ended.stdout)["profile"] == str(run / "profile" / "summary.json")
    told = summary_of(run)
    assert (told["steps"], told["rank"], told["ranks"]) == ([10, 11, 12], 0, 1)
    seconds = {kind: told["kinds"][kind]["seconds"] for kind in KINDS}
    for kind in ("products", "attention", "loss", "norms", "optimizer", "idle"):
        assert seconds[kind] > 0, kind
    assert seconds["messages"] == 0
    assert told["kinds"]["products"]["biggest"][0]["name"] == "aten::mm"
    assert told["no_promise"] is None
    assert told["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("which", ["alone", "together"])
def test_kinds_add_up_to_the_time_of_the_steps(which: str, request: pytest.FixtureRequest) -> None:
    _, run = request.getfixturevalue(which)
    told, recorded = summary_of(run), read(trace_of(run, 0))
    wall = sum(end - start for start, end in recorded.windows) / 3 / 1e9
    assert told["step_s"] == pytest.approx(wall, rel=1e-12)
    assert sum(told["kinds"][kind]["seconds"] for kind in KINDS) == pytest.approx(wall, rel=1e-9)
    assert sum(told["kinds"][kind]["share"] for kind in KINDS) == pytest.approx(1)


@pytest.mark.parametrize(("which", "ranks"), [("alone", 1), ("together", 2)])
def test_each_rank_leaves_a_trace_of_three_steps_with_their_phases(
    which: str, ranks: int, request: pytest.FixtureRequest
) -> None:
    _, run = request.getfixturevalue(which)
    assert len(list((run / "profile").iterdir())) == ranks + 1
    for rank in range(ranks):
        trace = trace_of(run, rank)
        assert read(trace).steps == (10, 11, 12)
        names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
        # Four sequences a step: micro-batches of one.
        assert names.count("fivefold: optimizer") == 3
        assert names.count("fivefold: loss and norm") == 3
        assert names.count("fivefold: forward and backward") == 3 * (1 + 4 // ranks)
        rows = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
        assert "measured" in rows
        assert ("promised" in rows) == (rank == 0)


def test_every_step_has_one_update_and_as_many_attentions_as_layers_and_micro_batches(alone: Any) -> None:
    """So no step is recorded in part, and none twice."""
    trace = trace_of(alone[1], 0)
    ran = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    windows = read(trace).windows
    assert ran.count("aten::_scaled_dot_product_flash_attention_for_cpu") == 3 * 2 * 4
    inside = [
        event
        for event in trace["traceEvents"]
        if event["name"] == "fivefold: optimizer"
        and any(start <= event["ts"] * 1000 < end for start, end in windows)
    ]
    assert len(inside) == 3


def test_two_ranks_send_messages_and_are_held_against_what_was_planned_for_two(together: Any) -> None:
    ended, run = together
    assert ended.exit_code == 0, ended.stderr
    told = summary_of(run)
    assert (told["rank"], told["ranks"]) == (0, 2)
    assert told["kinds"]["messages"]["seconds"] > 0
    assert told["kinds"]["copies"]["seconds"] > 0
    planned = json.loads((run / "planned.json").read_text())
    assert told["promise"]["step_s"] == pytest.approx(planned["step_time_s"])
    assert "laptop" in told["promise"]["of"]
    job = load(str(run / "job.toml"))
    expected = by_kind(Costs.of(Setup.of(job), cluster_of(job, "cpu", "cpu"))).kinds
    promised = {kind: told["kinds"][kind]["promised_s"] for kind in KINDS}
    assert {kind: promised[kind] for kind in expected} == pytest.approx(expected)


def test_the_terminal_has_the_table_and_says_where_the_rest_is(alone: Any) -> None:
    ended, run = alone
    lines = ended.stderr.splitlines()
    title = next(n for n, line in enumerate(lines) if line.startswith("profile of steps 10 to 12: CPU"))
    table = lines[title + 1 : lines.index(f"all figures: {run}/profile/summary.json")]
    assert table[0].split() == ["ms", "a", "step", "share", "promised", "measured", "/", "promised"]
    for said in ("products", "attention", "norms, elementwise", "optimizer", "idle", "step"):
        assert any(line.startswith(said) for line in table), said
    assert "promised: a rank on laptop, by data sheets" in table
    assert max(len(line) for line in table if str(run) not in line) <= 80


def test_recording_changes_no_number(together: Any, tmp_path: Path) -> None:
    _, run = together
    words = (*SMALL, *STEPS, *ONE, "--training.validate_every", "11")
    ended = typed("train", *words, "--nproc", "2", "--run", str(tmp_path / "plain"), "--json")
    assert json.loads(ended.stdout)["profile"] is None
    assert numbers(tmp_path / "plain") == numbers(run)
    assert not (tmp_path / "plain" / "profile").exists()


def test_a_pipelines_first_rank_is_held_against_its_own_promise(tmp_path: Path) -> None:
    words = (*SMALL, "--training.steps", "4", *ONE, "--layout.pp", "2")
    ended = typed("train", *words, "--nproc", "2", "--run", str(tmp_path / "run"), "--profile")
    assert ended.exit_code == 0, ended.stderr
    told = summary_of(tmp_path / "run")
    assert told["steps"] == [3, 4]
    assert told["kinds"]["loss"]["promised_s"] == 0  # the head is the other's
    assert told["kinds"]["loss"]["seconds"] == 0
    assert "rank 0 of the pipeline" in told["promise"]["of"]
    assert read(trace_of(tmp_path / "run", 1)).steps == (3, 4)


# --- what may go wrong -----------------------------------------------------------------------------------


def test_a_continued_run_is_profiled_anew_and_replaces_what_was_there(tmp_path: Path) -> None:
    job = load(None, "tiny", [f"{key}={value}" for key, value in zip(SMALL[2::2], SMALL[3::2], strict=True)])
    run = tmp_path / "run"
    training = job.training.model_copy(update={"steps": 4})
    first = train(job.model_copy(update={"training": training}), run=run, profile=True)
    assert isinstance(first, Summary)
    assert first.profile == str(run / "profile" / "summary.json")
    told = summary_of(run)
    assert told["promise"] is None
    assert "fivefold probe" in told["no_promise"]
    (run / "profile" / "rank-7.json.gz").write_text("of a rank that is no more")
    ended = typed("train", str(run), "--training.steps", "7", "--profile")
    assert ended.exit_code == 0, ended.stderr
    assert summary_of(run)["steps"] == [7]
    assert {file.name for file in (run / "profile").iterdir()} == {"rank-0.json.gz", "summary.json"}


def test_too_few_steps_are_refused_before_anything_starts(tmp_path: Path) -> None:
    ended = typed(
        "train", *SMALL, "--training.steps", "2", "--run", str(tmp_path / "run"), "--profile", "--json"
    )
    assert ended.exit_code == 2
    [problem] = json.loads(ended.stdout)["problems"]
    assert problem["key"] == "--profile"
    assert "2 steps" in problem["message"]
    assert "at least 3" in problem["hint"]
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "profile").write_text("a file in its place")
    ended = typed("train", *SMALL, "--training.steps", "4", "--run", str(run), "--profile")
    assert ended.exit_code == 2
    assert "--profile" in ended.stderr
    assert "cannot be written" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_a_profiler_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.training.recorder.supported_activities", set)
    ended = typed(
        "train", *SMALL, "--training.steps", "4", "--run", str(tmp_path / "run"), "--profile", "--json"
    )
    assert ended.exit_code == 0
    assert "not profiled: this torch" in ended.stderr
    told = json.loads(ended.stdout)
    assert (told["steps"], told["profile"]) == (4, None)


def test_a_profile_on_a_full_disk_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Recorder, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recorder, "write", full)
    ended = typed(
        "train", *SMALL, "--training.steps", "4", "--run", str(tmp_path / "run"), "--profile", "--json"
    )
    assert ended.exit_code == 0
    assert "No space left on device" in ended.stderr
    assert json.loads(ended.stdout)["profile"] is None
    assert list((tmp_path / "run" / "profile").iterdir()) == []


# --- the recorder by itself ------------------------------------------------------------------------------


def recorded(recorder: Recorder, steps: int, path: Path, **ending: Any) -> tuple[int, ...]:
    for step in range(1, steps + 1):
        recorder.begin(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
        recorder.end(step, **ending if step == steps else {})
    if not recorder.finished:
        recorder.close()
        return ()
    recorder.write(path)
    return read(json.loads(path.read_text())).steps


def test_a_run_that_stops_early_has_a_record_of_the_steps_it_took(tmp_path: Path) -> None:
    recorder = Recorder(range(3, 6), torch.device("cpu"))
    assert recorded(recorder, 4, tmp_path / "trace.json", over=True) == (3, 4)
    stopped_before = Recorder(range(3, 6), torch.device("cpu"))
    assert recorded(stopped_before, 2, tmp_path / "none.json", over=True) == ()


def test_a_run_that_goes_back_gives_up_its_record(tmp_path: Path) -> None:
    recorder = Recorder(range(2, 4), torch.device("cpu"))
    recorder.begin(1)
    recorder.end(1)
    recorder.begin(2)
    assert recorder.recording
    recorder.give_up("it went back")
    assert not recorder.recording
    assert recorder.problem == "it went back"
    assert recorded(recorder, 4, tmp_path / "trace.json") == ()


@pytest.mark.parametrize("move", ["start", "step", "stop"])
def test_a_profiler_that_fails_is_told_and_left_alone(
    move: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: torch.profiler.profile) -> None:
        raise RuntimeError("CUPTI says no\nand where it said so")

    monkeypatch.setattr(torch.profiler.profile, move, fails)
    recorder = Recorder(range(2, 4), torch.device("cpu"))
    assert recorded(recorder, 4, tmp_path / "trace.json") == ()
    assert recorder.problem == "torch's profiler fails: CUPTI says no"


def test_no_mark_is_made_outside_of_the_steps_that_are_recorded(tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []
    recorder = Recorder(range(2, 4), torch.device("cpu"))
    tell = recorder.telling(lambda phase, part: heard.append((phase, part)))
    for step in (1, 2, 3, 4):
        recorder.begin(step)
        tell("optimizer", step)
        recorder.end(step, pauses=True)
        tell("validation", step)
    recorder.write(tmp_path / "trace.json")
    assert heard == [(phase, step) for step in (1, 2, 3, 4) for phase in ("optimizer", "validation")]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ours = [event for event in events if event["name"].startswith("fivefold")]
    assert [event["name"] for event in sorted(ours, key=lambda event: event["ts"])] == [
        *("fivefold: step 2", "fivefold: optimizer", "fivefold: step 3", "fivefold: optimizer"),
    ]
