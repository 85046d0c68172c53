"""Training, verification and metrics, from Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, assert_type

import pytest

import fivefold
from tests.api.refused import refused

SMALL: Any = {
    "model": {"layers": 2, "dim": 32, "ffn": 32},
    "data": {"source": "random"},
    "training": {"steps": 3, "seq_len": 16, "global_batch": 4, "validate_every": 2, "validate_batches": 1},
    "run": {"tensorboard": False},
}


def script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(text)
    return subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=200, cwd=folder)


def test_train_verify_and_read(tmp_path: Path) -> None:
    job = fivefold.job("tiny", **SMALL)
    verdict = fivefold.verify(job, nproc=1)
    assert_type(verdict, fivefold.Verdict)
    assert verdict.ok
    assert repr(verdict).startswith("same (")
    run = tmp_path / "run"
    summary = fivefold.train(job, nproc=1, run=run)
    assert_type(summary, fivefold.Summary)
    assert repr(summary).startswith("3 steps, 192 tokens in ")
    metrics = fivefold.read_metrics(summary.folder)
    assert [step.step for step in metrics] == metrics.column("step") == [1, 2, 3]
    assert metrics[-1].loss == summary.loss
    assert metrics[-1].val_loss == summary.val_loss
    assert [step.val_loss is None for step in metrics] == [True, False, False]
    assert [line.split()[0] for line in repr(metrics).splitlines()] == ["step", "1", "2", "3"]
    assert "Did you mean 'loss'?" in refused(metrics.column, "los")

    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": null, "attempt": 2}\n{"step": 5, "lo')  # a killed run's half line
    torn = fivefold.read_metrics(run)
    assert len(torn) == 4
    assert torn[3].loss != torn[3].loss
    assert [step.step for step in torn[1:3]] == [2, 3]
    assert "Did you mean" in refused(fivefold.read_metrics, tmp_path / "runs")
    assert str(run) in refused(fivefold.read_metrics, tmp_path)
    assert "is a file" in refused(fivefold.read_metrics, run / "metrics.jsonl")


def test_a_long_run_prints_as_a_short_table(tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "loss": 1.0, "attempt": 1}}\n' for step in range(1, 1001)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    shown = repr(fivefold.read_metrics(tmp_path)).splitlines()
    assert len(shown) == 12
    assert shown[4].split()[0] == "..."
    assert shown[-1].split()[:2] == ["1000", "1.0000"]


def test_bad_launches_are_refused_in_pythons_words() -> None:
    assert refused(fivefold.train, fivefold.job(), nproc=0).startswith("nproc: 0 is out of range")
    assert refused(fivefold.verify, fivefold.job(), nproc="2").startswith("nproc: 2 is out of range")
    assert "fivefold.job" in refused(fivefold.train, "tiny")


def test_what_does_not_fit_is_refused_unless_it_is_forced(tmp_path: Path) -> None:
    """Forced, it comes as far as its data, of which there is none."""
    job = fivefold.job("llama3-405b", data={"source": str(tmp_path / "none.txt")})
    run = tmp_path / "run"
    told = refused(fivefold.train, job, nproc=1, run=run)
    assert told.startswith("memory: llama3-405b needs")
    assert told.endswith("To try all the same: force.")
    assert refused(fivefold.train, job, nproc=1, run=run, force=True).startswith("data.source")
    assert not run.exists()


@pytest.mark.parametrize("verb", ["train", pytest.param("verify", marks=pytest.mark.slow)])
def test_a_script_without_a_guard_is_told_in_one_line(tmp_path: Path, verb: str) -> None:
    text = f"import fivefold\nfivefold.{verb}(fivefold.job('tiny', **{SMALL!r}), nproc=2)\n"
    done = script(tmp_path, text)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(str(tmp_path / "script.py"))
    assert '`if __name__ == "__main__":`' in line


def test_a_script_with_a_guard_trains(tmp_path: Path) -> None:
    text = f"""
import fivefold
print("imported")
if __name__ == "__main__":
    print(fivefold.train(fivefold.job("tiny", **{SMALL!r}), nproc=2, run="run"))
"""
    done = script(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert "3 steps, 192 tokens" in done.stdout
    assert len(fivefold.read_metrics(tmp_path / "run")) == 3
