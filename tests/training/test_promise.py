"""A run that was planned keeps what the planner promised, and trains as chosen."""

from __future__ import annotations

import json
from pathlib import Path

import fivefold
from fivefold.config import load


def test_a_job_without_a_layout_trains_as_the_planner_says(tmp_path: Path, capsys) -> None:
    words = ["--data.source=random", "--training.seq_len=32", "--training.global_batch=8"]
    words += ["--training.steps=2", "--layout.auto=true", "--run.tensorboard=false"]
    summary = fivefold.train(load(None, "tiny", words), nproc=2, run=tmp_path / "run")
    assert summary.steps == 2
    promised = json.loads((tmp_path / "run" / "planned.json").read_text())
    assert promised["step_time_s"] > 0
    assert promised["allocated_bytes"] > 0
    written = load(str(tmp_path / "run" / "job.toml"))
    assert not written.layout.auto
    assert written.layout.dp_replicate is not None
    assert "planned:" in capsys.readouterr().err


def test_a_job_that_names_a_cluster_is_promised_something_too(tmp_path: Path) -> None:
    words = ["--data.source=random", "--training.seq_len=32", "--training.global_batch=8"]
    words += ["--training.steps=1", "--cluster.preset=laptop", "--run.tensorboard=false"]
    fivefold.train(load(None, "tiny", words), nproc=1, run=tmp_path / "run")
    assert (tmp_path / "run" / "planned.json").exists()
