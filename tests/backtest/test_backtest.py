"""The back-test: what it says of published runs, how it fits, and what it does with files of others."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fivefold.backtest.memory_fit import Prediction
from fivefold.backtest.outcomes import (
    DENSE,
    DGXC,
    PLAYBOOK,
    ZERO_BUBBLE,
    Outcome,
    backtest,
    by,
    judged,
    layout_kind,
    promise_of,
    regrets,
    running_out,
    write_rows,
)
from fivefold.backtest.published import PUBLISHED_RUNS, PublishedRun, read_runs
from fivefold.backtest.stacks import stack_named
from fivefold.backtest.time_fit import Fit, fitting_rows, left_out, predicted_times, shipped
from fivefold.cli import app
from fivefold.planner.time.constants import Constants

FITS = Prediction(40.0, 0.0, None)
FULL = Prediction(90.0, 1.0, None)


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    return read_runs()[0]


def outcome(run: PublishedRun, seconds: float, memory: Prediction = FITS) -> Outcome:
    return Outcome(run, seconds, seconds, memory, memory)


def test_every_row_gets_a_prediction(runs: list[PublishedRun]) -> None:
    some = random.Random(0).sample(runs, 400)
    times = predicted_times(some)
    assert np.isfinite(times).all()
    assert (times > 0).all()


def test_schedules_are_played_where_no_job_could_have_them(runs: list[PublishedRun]) -> None:
    run = next(run for run in runs if run.setup.schedule == "zbv")
    few = replace(run, setup=replace(run.setup, schedule="dualpipev", global_batch=4))
    odd = replace(run, setup=replace(run.setup, schedule="zb-2p"))
    times = predicted_times([run, few, odd])
    assert (times > 0).all()
    assert times[1] < times[0]


@pytest.mark.parametrize(
    ("which", "promised", "constants"),
    [
        (DGXC, 0.06, shipped),
        (DGXC, 0.06, left_out),
        (PLAYBOOK, 0.20, shipped),
        (PLAYBOOK, 0.20, left_out),
        (ZERO_BUBBLE, 0.06, shipped),
        (ZERO_BUBBLE, 0.10, left_out),  # One model only: left out, nothing of the stack was seen.
    ],
)
def test_errors_are_as_small_as_promised(runs: list[PublishedRun], which, promised, constants) -> None:
    """With constants fitted on these rows, and with constants that have not seen the source and model."""
    some = [run for run in runs if promise_of(run) == which and run.ok and run.step_time]
    times = predicted_times(some, constants)
    errors = [abs(time / (run.step_time or 1) - 1) for time, run in zip(times, some, strict=True)]
    assert len(some) >= 9
    assert np.mean(errors) <= promised


def test_dense_runs_are_within_a_tenth_by_source(runs: list[PublishedRun]) -> None:
    some = [run for run in runs if promise_of(run) == DENSE and run.ok and run.step_time]
    times, honest = predicted_times(some), predicted_times(some, left_out)
    told = [Outcome(r, float(a), float(b), FITS, FITS) for r, a, b in zip(some, times, honest, strict=True)]
    dense = next(each for each in judged(told) if each.name == DENSE)
    assert dense.rows > 1000
    assert dense.error <= 0.10
    assert dense.honest <= 0.15


def test_choosing_by_prediction_costs_little(runs: list[PublishedRun]) -> None:
    some = [run for run in runs if "benchmarks_interactive" in run.source and run.ok and run.gpus <= 128]
    told = [
        Outcome(run, 0.0, float(seconds), FITS, FITS)
        for run, seconds in zip(some, predicted_times(some, left_out), strict=True)
    ]
    cells = regrets(told)
    assert len(cells) >= 5
    assert np.mean([cell.regret for cell in cells]) <= 0.06


def test_ties_are_counted_against_us(runs: list[PublishedRun]) -> None:
    cell = [
        run for run in runs if run.model == "Llama-like 3B" and run.gpus == 32 and run.ok and run.step_time
    ]
    told = [outcome(run, 1.0) for run in cell]
    times = [run.step_time or 0 for run in cell]
    assert regrets(told)[0].regret == pytest.approx(1 - min(times) / max(times))
    assert regrets([outcome(run, run.step_time or 0) for run in cell])[0].regret == 0
    assert regrets(told[:9]) == []


def test_lines_are_means(runs: list[PublishedRun]) -> None:
    timed = [run for run in runs if run.ok and run.step_time][:2]
    told = [
        outcome(timed[0], 1.1 * (timed[0].step_time or 0)),
        outcome(timed[1], 0.7 * (timed[1].step_time or 0)),
    ]
    found = by(told, lambda _: "two")[0]
    assert found.rows == 2
    assert found.error == pytest.approx(0.2)
    assert found.bias == pytest.approx(-0.1)
    assert found == replace(by(told, lambda run: run.publication)[0], name="two")


def test_running_out_is_precision_and_recall(runs: list[PublishedRun]) -> None:
    playbook = [run for run in runs if run.source.startswith("HF")]
    failed, fine = [run for run in playbook if not run.ok], [run for run in playbook if run.ok]
    told = [
        outcome(failed[0], 1, FULL),
        outcome(failed[1], 1),
        outcome(failed[2], 1),
        outcome(fine[0], 1, FULL),
        outcome(fine[1], 1),
    ]
    found = running_out(told)
    assert (found.rows, found.precision, found.recall) == (5, 1 / 2, 1 / 3)
    assert running_out(told[4:]).precision is None


def test_layout_kinds(runs: list[PublishedRun]) -> None:
    assert {layout_kind(run) for run in runs[:600]} >= {"dp", "tp", "tp pp", "tp pp cp"}


def test_fitting_finds_the_constants_that_made_the_times(runs: list[PublishedRun]) -> None:
    rows = [run for run in runs if run.stack == "nemo" and "dgxc" in run.source and run.device == "H100 SXM"]
    rows = fitting_rows(rows)[::3]
    truth = Constants(matmul=0.5, experts=0.6)
    made = predicted_times(rows, lambda _: truth)
    rows = [replace(run, step_time=float(seconds)) for run, seconds in zip(rows, made, strict=True)]
    table = Fit(rows, stack_named("nemo"))
    found = table.constants(table.best(np.ones(len(rows), dtype=bool)))
    assert found.matmul == pytest.approx(0.5, rel=0.03)
    assert found.experts == pytest.approx(0.6, rel=0.05)


# --- the command ---------------------------------------------------------------------------------------


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Some published rows, one of them broken, in a file without the notes."""
    with open(PUBLISHED_RUNS, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    chosen = [rows[number] for number in (0, 21, 51, 500, 700, 900, 2000, 2140, 2700)]
    chosen[3] = chosen[3] | {"tp": "many"}
    path = tmp_path / "few.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        columns = [name for name in chosen[0] if name != "notes"]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(chosen)
    return path


def test_a_file_of_others(few: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    result = CliRunner().invoke(app, ["backtest", "--runs", str(few), "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["rows"] == 8
    assert any("row 3, column tp" in problem for problem in told["problems"])
    assert any("column notes" in problem for problem in told["problems"])
    assert {each["name"] for each in told["by_device"]} <= {"H100 SXM", "A100 SXM 80GB", "H100 SXM 96GB"}
    with open(out, newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == ["row", "predicted_step_time_s", "predicted_memory_gib", "predicted_fits"]
    assert [int(each["row"]) for each in lines] == [0, 1, 2, 4, 5, 6, 7, 8]
    assert all(float(each["predicted_step_time_s"]) > 0 for each in lines)
    assert all(float(each["predicted_memory_gib"]) > 0 for each in lines)
    assert {each["predicted_fits"] for each in lines} <= {"true", "false"}


def test_text_for_people(few: Path) -> None:
    result = CliRunner().invoke(app, ["backtest", "--runs", str(few)])
    assert result.exit_code == 0, result.output
    assert "honest error" in result.stdout
    assert "row 3, column tp: 'many' is not a number" in result.stdout


@pytest.mark.parametrize(
    "words",
    [["--runs", "nowhere.csv"], ["--runs", "{few}", "--out", "/none/x.csv"], ["--runs", "{few}", "--fit"]],
)
def test_bad_input(few: Path, words: list[str]) -> None:
    result = CliRunner().invoke(app, ["backtest", *(word.format(few=few) for word in words), "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"] == "bad input"


def test_a_file_without_a_readable_row(tmp_path: Path) -> None:
    path = tmp_path / "none.csv"
    path.write_text("model,n_gpus\nMystery,8\n")
    assert CliRunner().invoke(app, ["backtest", "--runs", str(path)]).exit_code == 2


@pytest.mark.slow
def test_the_whole_back_test(runs: list[PublishedRun], tmp_path: Path) -> None:
    told = backtest(runs)
    assert len(told) == 3360
    write_rows(told, tmp_path / "rows.csv")
    assert all(each.honest <= 0.2 for each in judged(told))
