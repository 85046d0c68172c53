"""Curves of held-out loss in 8 bits: what is kept, what is compared, and that it runs."""

import json

import pytest

from benchmarks.fp8_curves import JOB, KINDS, compared, settings_of
from benchmarks.fp8_curves import main as command
from fivefold.axes.fp8 import in_fp8
from fivefold.config import load, resolve
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameter_count

CURVES = {
    "bf16-0": [(10, 3.0), (20, 2.0)],
    "tensorwise-0": [(10, 3.0), (20, 2.01)],
    "rowwise-0": [(10, 3.0), (20, 2.1)],
}


def test_the_last_losses_are_compared_with_those_of_bf16():
    rows, good = compared(CURVES, [0])
    assert [row[2:] for row in rows] == [["2.0000", "+0.00%"], ["2.0100", "+0.50%"], ["2.1000", "+5.00%"]]
    assert not good
    assert compared({**CURVES, "rowwise-0": CURVES["tensorwise-0"]}, [0])[1]


def test_a_run_that_is_missing_is_no_success():
    rows, good = compared(CURVES, [0, 1])
    assert not good
    assert [row[2] for row in rows[3:]] == ["missing"] * 3


def test_a_model_of_a_hundred_million_with_every_layer_in_8_bits():
    words = [f"--{key}={value}" for key, value in settings_of("rowwise", 0, 1000, small=False).items()]
    job = resolve(load(None, None, words), 1, "cuda")
    assert 90e6 < parameter_count(job.spec) < 110e6
    assert job.training.global_batch * job.training.seq_len == 65_536
    assert len(in_fp8(Setup.of(job))) == 7
    assert job.training.validate_every == 50


@pytest.mark.slow
def test_it_runs_on_any_machine_and_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    common = ["", "--small", "--steps", "4", "--json", str(file), "--runs", str(tmp_path / "runs")]
    cache = [f"--data.cache={tmp_path / 'cache'}"]
    monkeypatch.setattr("sys.argv", [*common, "--kinds", "bf16", *cache])
    assert command() == 0
    kept = json.loads(file.read_text())["curves"]
    assert [step for step, _ in kept["bf16-0"]] == [1, 2, 3, 4]
    monkeypatch.setattr("sys.argv", [*common, "--kinds", "bf16", "tensorwise", "--minutes", "0.01", *cache])
    assert command() == 1  # stopped
    monkeypatch.setattr("sys.argv", [*common, *cache])
    assert command() == 0
    assert json.loads(file.read_text())["curves"]["bf16-0"] == kept["bf16-0"]
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", [*common, "--compare", "--png", str(picture)])
    command()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-3:]] == list(KINDS)
    assert picture.stat().st_size > 0


def test_nothing_is_trained_by_comparing(tmp_path, capsys, monkeypatch):
    words = ["", "--json", str(tmp_path / "a.json"), "--compare", "--optimizer.lr=1"]
    monkeypatch.setattr("sys.argv", words)
    assert command() == 2
    assert "takes no --optimizer.lr=1" in capsys.readouterr().err
    assert JOB["optimizer.lr"] == 1e-3
