"""A simulated step, as a Python object."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import pytest

import fivefold
from tests.api.refused import refused


def test_a_simulated_step_has_figures_and_prints_as_a_timeline(tmp_path: Path) -> None:
    job = fivefold.job("llama3-8b", layout={"pp": 4}, training={"global_batch": 16})
    step = fivefold.simulate(job, cluster="dgx-h100", gpus=8)
    assert_type(step, fivefold.Simulation)
    assert step.step_time == step.figures["step_time_s"]
    assert step.exposed["dp"] == pytest.approx(step.figures["exposed"]["dp"] / 1e3)
    assert 0 < step.bubble < 1
    assert 0 < step.optimizer < step.step_time
    assert (step.memory_gib, step.fits) == (step.figures["memory_gib"], True)
    lines = repr(step).splitlines()
    assert [line[:6] for line in lines[1:5]] == [f"rank {rank}" for rank in range(4)]
    assert lines[5].startswith(f"step              {step.step_time * 1e3:,.1f} ms")
    assert len(repr(step.shown)) < 150
    step.write_png(tmp_path / "step.png")
    step.write_trace(tmp_path / "step.json")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert "traceEvents" in (tmp_path / "step.json").read_text()
    assert "there is no folder" in refused(step.write_png, tmp_path / "no" / "step.png")


def test_a_long_timeline_is_cut() -> None:
    step = fivefold.simulate(fivefold.job("llama3-8b", layout={"pp": 32}, training={"global_batch": 32}))
    assert "... and 16 rows more" in repr(step)
    assert len(repr(step).splitlines()) < 25


def test_what_cannot_be_simulated_is_refused() -> None:
    assert refused(fivefold.simulate, fivefold.job(), gpus=0).startswith("gpus: is 0")
    assert refused(fivefold.simulate, fivefold.job(), gpus="8").startswith("gpus: is 8")
    assert "fivefold.job" in refused(fivefold.simulate, "tiny")
