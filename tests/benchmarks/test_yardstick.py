"""Cases in turns: which are run, what they are held against, and that each runs."""

import json
import sys

import pytest
import torch

from benchmarks.plain_loop import PlainModel, Projections
from benchmarks.trained import DoesNotFitError, Steady, output_of
from benchmarks.yardstick import EIGHT_B, JOBS, OURS, WHOLE, as_rows, collected, ratio_of
from benchmarks.yardstick import main as command
from fivefold.axes.checks import check
from fivefold.config import job_with, load, resolve
from fivefold.models.presets import PRESETS


def steady(step_s: float) -> Steady:
    return Steady(step_s, 100 / step_s, 1.0)


def test_cases_take_turns_and_what_does_not_fit_is_not_tried_again():
    tried = []

    def run(case):
        tried.append(case)
        if case == "b":
            raise DoesNotFitError
        return steady(1.0)

    found = collected("", ["a", "b", "c"], 2, run)
    assert tried == ["a", "b", "c", "a", "c"]
    assert {case: len(rounds) for case, rounds in found.items()} == {"a": 2, "b": 0, "c": 2}


def test_a_ratio_is_of_all_rounds_seconds():
    assert ratio_of([steady(1.0), steady(1.0)], [steady(1.0), steady(2.0)]) == 1.5
    rows = as_rows({"a": [steady(2.0)], "b": [steady(1.0)], "c": []})
    assert rows == [
        ["a", "50", "1.000", "2.0000", "1.00"],
        ["b", "100", "2.000", "1.0000", "1.00"],
        ["c", "does not fit", "", "", ""],
    ]


def test_running_out_of_memory_is_told_from_other_errors():
    fail = [sys.executable, "-c", "raise SystemExit('torch.OutOfMemoryError: CUDA out of memory. Tried')"]
    with pytest.raises(DoesNotFitError):
        output_of(fail)
    with pytest.raises(RuntimeError) as error:
        output_of([sys.executable, "-c", "raise SystemExit('another thing')"])
    assert not isinstance(error.value, DoesNotFitError)
    assert "another thing" in str(error.value)


@pytest.mark.parametrize("file", JOBS)
@pytest.mark.parametrize("case", OURS)
def test_every_case_is_a_job_that_there_is(file, case):
    words = [f"--{key}={value}" for key, value in OURS[case].items()]
    assert check(resolve(load(file, overrides=words), 1, "cuda")) == []


@pytest.mark.parametrize("case", WHOLE)
def test_so_is_each_of_the_whole_model(case):
    settings = {**EIGHT_B, **WHOLE[case], "training.compile": True}
    assert check(resolve(job_with(settings), 1, "cuda")) == []


def test_separate_projections_are_the_fused_ones():
    torch.manual_seed(0)
    fused, apart = (Projections(8, [16, 4, 4], separate) for separate in (False, True))
    (whole,) = fused.parameters()
    with torch.no_grad():
        for layer, weight in zip(apart.parameters(), whole.split([16, 4, 4]), strict=True):
            layer.copy_(weight)
    x = torch.randn(2, 3, 8)
    for one, other in zip(fused(x), apart(x), strict=True):
        torch.testing.assert_close(one, other)
    spec = PRESETS["tiny"]
    counts = {sum(p.numel() for p in PlainModel(spec, separate).parameters()) for separate in (False, True)}
    assert len(counts) == 1


@pytest.mark.slow
def test_it_runs_on_any_machine(tmp_path, capsys, monkeypatch):
    file = tmp_path / "out.json"
    words = ["", JOBS[0], "--small", "--rounds", "1", "--steps", "2", "--json", str(file)]
    monkeypatch.setattr("sys.argv", words)
    assert command() == 0
    table = capsys.readouterr().out.splitlines()[-5:]
    assert [line.split()[0] for line in table] == ["h200_1b", "plain", "bf16", "fp8", "fp8-head"]
    figures = json.loads(file.read_text())["h200_1b"]
    assert all(rounds[0]["tokens_per_s"] > 0 for rounds in figures.values())


@pytest.mark.slow
def test_so_do_the_whole_models_cases(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["", "--whole-8b", "--small", "--steps", "2"])
    assert command() == 0
    assert "does not fit" not in capsys.readouterr().out
