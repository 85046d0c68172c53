"""`training.deterministic` holds inside a run, and leaves no trace in a process that goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.config import Job
from fivefold.training import run as run_module
from fivefold.training.deterministic import WORKSPACE, fixed_order
from fivefold.training.launch import train
from tests.cases import Case


def state() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get(WORKSPACE),
    )


def job(deterministic: bool) -> Job:
    return Case("one", training={"deterministic": deterministic, "steps": 2}).job()


def test_a_run_is_deterministic_and_the_process_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    advance = run_module.TrainingRun.advance

    def noted(run: run_module.TrainingRun) -> dict[str, Any]:
        seen.append(state())
        return advance(run)

    monkeypatch.setattr(run_module.TrainingRun, "advance", noted)
    before = state()
    found = [train(job(each), 1, tmp_path / str(each)).loss for each in (False, True)]
    assert state() == before
    assert seen == [before] * 2 + [(True, False, True, False, ":4096:8")] * 2
    assert found[0] == found[1]


def test_all_is_as_before_after_an_error_and_a_workspace_of_the_users_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    before = state()

    def fail() -> None:
        with fixed_order(job(True)):
            assert state() == (True, False, True, False, ":16:8")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert state() == before
