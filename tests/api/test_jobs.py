"""Jobs from values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fivefold
from fivefold.api.jobs import Sections
from fivefold.commands.common import read_job
from fivefold.config import dump_toml
from tests.api.refused import refused


def test_settings_by_section_and_by_key_are_the_same() -> None:
    by_section = fivefold.job("tiny", training={"steps": 20}, layout={"zero": 3})
    by_key = fivefold.job("tiny", {"training.steps": 20, "layout.zero": 3})
    mixed = fivefold.job("tiny", {"training": {"steps": 9}, "layout.zero": 3}, training={"steps": 20})
    words = read_job(["--training.steps", "20", "--layout.zero", "3"], "tiny")
    assert by_section == by_key == mixed == words
    assert words == fivefold.load_job(None, "tiny", ["--training.steps=20", "--layout.zero=3"])
    assert repr(by_section) == (
        "Job(model.preset='tiny', training.steps=20, optimizer.lr=0.003, layout.zero=3)"
    )


def test_settings_go_over_a_file_and_leave_the_rest_of_a_section(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[training]\nsteps = 5\nseq_len = 64\n")
    job = fivefold.job(file=file, training={"steps": 7}, run={"folder": tmp_path / "run"})
    assert (job.training.steps, job.training.seq_len) == (7, 64)
    assert job.run.folder == str(tmp_path / "run")
    file.write_text(dump_toml(job))
    assert fivefold.job(file=file) == job


def test_settings_of_the_caller_stay_as_they_are() -> None:
    training = {"steps": 5}
    fivefold.job("tiny", {"training": training}, training={"seed": 1})
    assert training == {"steps": 5}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preset": "tinny"}, "Did you mean 'tiny'?"),
        ({"training": {"stpes": 3}}, "training.stpes: there is no such key\n    Did you mean 'steps'?"),
        ({"trainning": {}}, "trainning: there is no such section\n    Did you mean 'training'?"),
        ({"overrides": {"training.stpes": 3}}, "Did you mean 'steps'?"),
        ({"overrides": ["--training.steps", "3"]}, "Give a mapping"),
        ({"training": 3}, "training: 3 is not a section"),
        ({"layout": {"zero": 4}}, "layout.zero: 4 is out of range"),
        ({"file": "nowhere.toml"}, "nowhere.toml: there is no such file"),
    ],
)
def test_bad_jobs_are_refused_with_a_hint(given: dict[str, Any], said: str) -> None:
    assert said in refused(fivefold.job, **given)


def test_a_job_made_by_hand_is_refused_alike() -> None:
    assert refused(fivefold.Job, training={"stpes": 3}) == refused(fivefold.job, training={"stpes": 3})


def test_sections_have_their_names() -> None:
    assert Sections.__annotations__.keys() == fivefold.Job.model_fields.keys()
