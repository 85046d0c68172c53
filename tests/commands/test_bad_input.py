"""Bad input exits with 2, in the user's words."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.commands.typed import SMALL, typed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --trainning.steps 3", "Did you mean 'training'?"),
        ("train --training.stps=3", "training.stps: there is no such key\n    Did you mean 'steps'?"),
        (
            "verify --layout.zero 4",
            "layout.zero: 4 is out of range\n    Allowed: an integer, at least 0 and at most 3.",
        ),
        ("train --nprocs 4", "Did you mean '--nproc'?"),
        ("train --steps 4", "Did you mean '--training.steps'?"),
        ("train --nproc 0", "--nproc: 0 is out of range"),
        ("train nowhere.toml", "nowhere.toml: there is no such file"),
        ("train one.toml two.toml", "two.toml: is a second job file"),
        ("train --preset tinny", "Did you mean 'tiny'?"),
        ("keys trainin", "Did you mean 'training'?"),
        ("trian", "trian"),
    ],
)
def test_bad_input_exits_2_and_says_what_is_meant(words, said):
    ended = typed(*words.split())
    assert ended.exit_code == 2
    assert said in ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr


def test_what_only_a_resolved_job_shows_exits_2_before_any_rank_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = typed("train", *SMALL, "--nproc", "3", "--json")
    assert ended.exit_code == 2
    assert json.loads(ended.stdout)["problems"][0]["key"] == "training.global_batch"
    assert "3 or 6" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_setting_counts_beside_a_job_file_and_a_preset(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('[model]\npreset = "gpt2"\n[training]\nsteps = 0\n')
    wrong = ("--preset", "tinny", "--layout.zero", "4", "--optimizer.lr", "0")
    told = json.loads(typed("train", str(file), *wrong, "--json").stdout)
    assert {problem["key"] for problem in told["problems"]} == {
        *("model.preset", "training.steps", "layout.zero", "optimizer.lr"),
    }


def test_the_process_ends_with_that_code():
    ended = subprocess.run(
        [sys.executable, "-m", "fivefold", "keys", "trainin"], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Did you mean 'training'?" in ended.stderr
