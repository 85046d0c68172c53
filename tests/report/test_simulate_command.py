"""`fivefold simulate`, as a program sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fivefold.commands.common import SETTINGS
from fivefold.commands.simulate import simulate
from fivefold.config import load
from fivefold.report.simulated_job import asked, step_shown
from fivefold.schedules.actions import COMPUTATIONS

APP = typer.Typer(rich_markup_mode=None)
APP.command(context_settings=SETTINGS)(simulate)
ZERO_BUBBLE = "--forward 18.522 --backward-input 18.086 --backward-weight 9.337 --transfer 0.601"
TINY = "--preset tiny --training.global_batch 16 --training.seq_len 64 --cluster dgx-h100"


def run(words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(APP, words.split())
    return done.exit_code, done.stdout, done.stderr


def answer(words: str) -> dict[str, Any]:
    code, out, err = run(f"{words} --json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_schedule_alone() -> None:
    found = answer(f"--schedule 1f1b --stages 8 --micro-batches 24 {ZERO_BUBBLE}")
    assert found["bubble"] == pytest.approx(0.2431, abs=0.0001)
    assert found["step_time"] == pytest.approx(1456.75, abs=0.01)
    assert found["peak_in_flight"] == [8, 7, 6, 5, 4, 3, 2, 1]


def test_virtual_stages_share_a_ranks_time() -> None:
    found = answer(f"--schedule interleaved --stages 8 --micro-batches 24 --virtual-stages 3 {ZERO_BUBBLE}")
    assert found["bubble"] == pytest.approx(0.1055, abs=0.005)


def test_times_of_each_stage() -> None:
    words = "--schedule gpipe --stages 2 --micro-batches 1 --backward-input 1 --backward-weight 0"
    assert answer(f"{words} --forward 1,5")["step_time"] == pytest.approx(8)


def test_for_people(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    code, out, _ = run(f"--schedule zb-h2 --stages 4 --micro-batches 8 {ZERO_BUBBLE} --trace {trace}")
    assert code == 0
    assert "zb-h2: 4 ranks, 8 micro-batches" in out
    assert "rank 3 ▕" in out
    assert "bubble" in out
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--schedule 1f1b", "--schedule: needs --stages, --micro-batches, --forward"),
        (f"--schedule 1f1 --stages 4 --micro-batches 8 {ZERO_BUBBLE}", "Did you mean '1f1b'?"),
        (f"--schedule 1f1b --stages 4 --micro-batches 8 {ZERO_BUBBLE} --gpus 8", "--gpus: belongs to a job"),
        (
            f"--schedule 1f1b --stages 4 --micro-batches 8 {ZERO_BUBBLE} job.toml",
            "job.toml: belongs to a job",
        ),
        (f"--schedul 1f1b --stages 4 --micro-batches 8 {ZERO_BUBBLE}", "Did you mean '--schedule'?"),
        ("--preset tiny --stages 4", "--stages: is for a schedule without a job"),
        ("--preset tiny --price 2", "Add --run."),
        ("--preset tiny --gpus 0", "--gpus: is 0"),
        ("--preset tiny --cluster dgx-h10", "Did you mean 'dgx-h100'?"),
        ("--preset tiny --layout.pp 3 --gpus 4", "layout"),
    ],
)
def test_bad_input(words: str, said: str) -> None:
    code, out, err = run(f"{words} --json")
    assert code == 2
    assert said in err
    assert json.loads(out)["error"] == "bad input"


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--forward", "x", "not a time"),
        ("--forward", "1,2,3", "has 3 times"),
        ("--backward-input", "-1", "0 or more"),
        ("--backward-weight", "nan", "0 or more"),
        ("--transfer", "-1", "0 or more"),
        ("--transfer", "inf", "0 or more"),
    ],
)
def test_bad_times(option: str, value: str, said: str) -> None:
    times = {"--forward": "1", "--backward-input": "1", "--backward-weight": "1", option: value}
    words = " ".join(f"{name}={text}" for name, text in times.items())
    code, _, err = run(f"--schedule gpipe --stages 2 --micro-batches 2 {words}")
    assert code == 2
    assert option in err
    assert said in err


def test_a_job_with_a_pipeline() -> None:
    found = answer(f"{TINY} --gpus 4 --layout.pp 2")
    assert found["step_time"] == pytest.approx(1000 * found["step_time_s"])
    assert 0 < found["bubble"] < 1
    assert set(found["exposed"]) >= {"pp", "dp"}
    assert all(time >= 0 for time in found["exposed"].values())
    assert found["peak_in_flight"] == [2, 1]
    assert len(found["held_gib"]) == 2
    assert found["fits"] is True
    assert found["layout"]["pp"] == 2


def test_a_job_without_one() -> None:
    code, out, _ = run(f"{TINY} --gpus 4")
    assert code == 0
    assert " compute ▕" in out
    assert "messages ▕" in out
    assert "exposed messages  dp" in out


def test_a_jobs_file_says_how_many_devices(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\npreset = "tiny"\n[layout]\npp = 2\ndp_shard = 2\n[cluster]\npreset = "dgx-a100"\n'
    )
    found = answer(str(job))
    assert found["devices"] == 4
    assert found["cluster"] == "dgx-a100"
    assert answer(f"{job} --cluster dgx-h100")["step_time"] < found["step_time"]


def test_a_whole_training() -> None:
    run_of = answer(f"{TINY} --gpus 4 --training.steps 1000000 --run --price 2 --checkpoint-seconds 1")["run"]
    assert 0.5 < run_of["goodput"] <= 1
    assert run_of["days_p50"] <= run_of["days_p90"]
    assert run_of["cost_p50"] == pytest.approx(run_of["days_p50"] * 24 * 4 * 2)
    assert run_of["campaign"]["checkpoint_seconds"] == 1


def test_a_training_on_devices_that_never_fail_takes_its_steps_and_one_checkpoint() -> None:
    words = f"{TINY} --gpus 4 --training.steps 1000 --run --checkpoint-seconds 1 --failures-per-gpu-hour 0"
    found = answer(words)
    seconds = 1000 * found["step_time_s"] + 1
    assert found["run"]["days_p90"] == pytest.approx(seconds / 86_400)
    assert found["run"]["seconds_between_failures"] is None


def test_curves_and_events_of_a_step_are_on_one_clock() -> None:
    """Memory falls to what it was with the last backward pass, which the optimizer comes behind."""
    job = load(None, "tiny", ["--layout.pp=2", "--training.global_batch=16", "--training.seq_len=64"])
    shown = step_shown(asked(job, "dgx-h100", 4))
    for name, curve in shown.curves.items():
        computed = [event for event in shown.rows[name] if event.kind in COMPUTATIONS]
        assert curve[0][0] == computed[0].start
        assert curve[-1][0] == computed[-1].end
        assert [shown.number(event) for event in computed] == [str(event.micro_batch) for event in computed]
    assert shown.end == pytest.approx(shown.figures["step_time"])


def test_what_fits_is_what_plan_would_take() -> None:
    """76 GiB of an H100's 80 are too many to be counted on, for `plan` and so here."""
    words = "--preset llama3-8b --cluster dgx-h100 --gpus 8 --training.seq_len 8192 --training.micro_batch 1"
    words += " --training.global_batch 8 --layout.zero 3 --optimizer.ema 0.999"
    found = answer(words)
    assert found["memory_gib"] < 80
    assert found["fits"] == (found["chance_of_running_out"] <= 0.1)
    assert not found["fits"]
    code, out, _ = run(words)
    assert code == 0
    assert "can be counted on" in out


def test_a_cluster_has_so_many_devices_and_no_more() -> None:
    code, _, err = run("--preset tiny --cluster laptop --gpus 64 --training.global_batch 64")
    assert code == 2
    assert "--gpus: 64 devices, but laptop has 8" in err


def test_a_laptop_computes_in_32_bits() -> None:
    """As `plan` has it: the same devices, the same precision."""
    words = "--preset tiny --training.global_batch 16 --training.seq_len 64 --cluster laptop --gpus 2"
    code, _, err = run(f"{words} --training.precision bf16")
    assert code == 0, err
    assert answer(words)["step_time_s"] == answer(f"{words} --training.precision fp32")["step_time_s"]


@pytest.mark.parametrize("option", ["--png", "--trace"])
def test_where_nothing_can_be_written_is_told_before_the_work(option: str) -> None:
    code, _, err = run(f"{TINY} {option} /nowhere/at/all")
    assert code == 2
    assert f"{option}: '/nowhere/at/all': there is no folder /nowhere/at" in err
