"""`fivefold train RUN`: a run goes on from its folder; what it left open in its layout is derived anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fivefold
from fivefold.api.metrics import read_metrics
from fivefold.cli import app
from fivefold.config import Job, job_with, load, resolve
from fivefold.config.run_folder import ranks_before
from fivefold.problems import BadInput
from fivefold.training.job_files import keep_jobs

RUNNER = CliRunner()
SMALL: dict[str, Any] = {
    "model": {"vocab_size": 64, "dim": 16, "layers": 2, "heads": 2, "ffn": 16, "max_seq_len": 16},
    "training": {"steps": 2, "global_batch": 4, "seq_len": 8, "precision": "fp64"},
    "optimizer": {"schedule": "constant", "warmup": 1},
    "data": {"source": "random"},
    "run": {"tensorboard": False},
}


def job(**sections: dict[str, Any]) -> Job:
    return job_with(SMALL, sections)


def call(*words: object) -> tuple[int, str]:
    result = RUNNER.invoke(app, list(map(str, words)))
    return result.exit_code, result.output


def losses(folder: Path) -> list[float]:
    return [step.loss for step in read_metrics(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run of six steps that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    fivefold.train(job(training={"steps": 6}), nproc=1, run=folder)
    return losses(folder)


def test_a_run_from_python_goes_on_by_its_folder_on_other_ranks(tmp_path: Path, whole: list[float]) -> None:
    run = tmp_path / "run"
    fivefold.train(job(), run=run)
    code, text = call("train", run, "--nproc", 2, "--training.steps", 4)
    assert code == 0, text
    assert load(str(run / "job.toml")).layout.dp_shard == 2
    assert load(str(run)).layout.dp_shard is None
    code, text = call("train", run, "--training.steps=6")  # as many ranks as it had
    assert code == 0, text
    assert load(str(run / "job.toml")).layout.dp_shard == 2
    assert load(str(run)).training.steps == 6
    assert losses(run) == pytest.approx(whole, rel=1e-9)
    code, text = call("train", run, "--training.global_batch", 8)
    assert (code, "training.global_batch: 8, but this run was started with 4" in text) == (2, True)
    code, text = call("train", run, "--nproc", 3)
    assert (code, "training.global_batch: 4 does not split evenly over 3" in text) == (2, True)


@pytest.mark.slow
def test_a_run_goes_on_under_torchrun(tmp_path: Path, whole: list[float]) -> None:
    run = tmp_path / "run"
    fivefold.train(job(), run=run)
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "fivefold",
        "train",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    more = [str(run), "--training.steps", "6"]
    subprocess.run([sys.executable, *words, *more], check=True, env=environment, timeout=300)
    assert load(str(run / "job.toml")).layout.dp_shard == 2
    assert losses(run) == pytest.approx(whole, rel=1e-9)


DEGREES = st.sampled_from([None, 1, 2])


@settings(max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries(
        {"zero": st.sampled_from([None, 0, 1, 3])} | dict.fromkeys(("dp_shard", "tp", "pp", "cp"), DEGREES)
    ),
    st.sampled_from([None, 1, 2]),
    st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8])),
)
def test_what_was_left_open_is_open_still(
    tmp_path_factory: pytest.TempPathFactory,
    layout: dict[str, Any],
    micro: int | None,
    ranks: tuple[int, int],
) -> None:
    """Going on with N ranks is what starting with N would have been; what cannot be is refused alike."""
    layout = {key: value for key, value in layout.items() if value is not None}
    asked = job(layout=layout, training={"micro_batch": micro})
    before, after = ranks
    try:
        resolved = resolve(asked, before)
    except BadInput:
        return
    folder = tmp_path_factory.mktemp("run")
    keep_jobs(folder, asked, resolved)
    again = load(str(folder))
    assert again.run.folder == str(folder)
    assert ranks_before(folder, again) == before
    assert outcome(again, after) == outcome(asked, after)
    assert outcome(again, before) == resolved.model_dump(exclude={"run"})


def outcome(job: Job, ranks: int) -> object:
    """The job for so many ranks, or why it cannot be."""
    try:
        return resolve(job, ranks).model_dump(exclude={"run"})
    except BadInput as error:
        return str(error)


def test_what_was_fixed_is_kept_or_refused_by_its_key(tmp_path: Path) -> None:
    asked = job(layout={"tp": 2})
    keep_jobs(tmp_path, asked, resolve(asked, 2))
    assert resolve(load(str(tmp_path)), 4).layout.dp_shard == 2
    code, text = call("train", tmp_path, "--nproc", 3)
    assert code == 2
    assert "layout.tp: tp 2 makes 2, but there are 3 ranks" in text


def test_what_the_planner_chose_is_chosen_anew(tmp_path: Path) -> None:
    asked = job(layout={"auto": True, "zero": 1})
    fixed = asked.layout.model_copy(update={"auto": False, "tp": 2})
    keep_jobs(tmp_path, asked, resolve(asked.model_copy(update={"layout": fixed}), 2))
    layout = load(str(tmp_path)).layout
    assert layout.model_dump(exclude_unset=True) == {"auto": True, "zero": 1}
    assert load(str(tmp_path / "job.toml")).layout.tp == 2


def test_another_layout_beside_it_says_how_many_ranks(tmp_path: Path) -> None:
    keep_jobs(tmp_path, job(), resolve(job(), 2))
    assert ranks_before(tmp_path, load(str(tmp_path))) == 2
    assert ranks_before(tmp_path, load(str(tmp_path), overrides=["--layout.tp", "4"])) is None
    assert ranks_before(tmp_path / "gone", job()) is None


def test_a_run_without_what_was_asked_for_goes_on_as_it_was(tmp_path: Path) -> None:
    keep_jobs(tmp_path, job(), resolve(job(), 2))
    (tmp_path / "asked.toml").unlink()
    assert load(str(tmp_path)).layout.dp_shard == 2


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    code, text = call("train", tmp_path)
    assert code == 2
    assert f"{tmp_path}: is a folder, but not that of a run: there is no job.toml in it" in text
    assert list(tmp_path.iterdir()) == []
