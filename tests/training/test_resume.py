"""A run folder is taken up only by a job that continues it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.config import Job, resolve
from fivefold.problems import BadInput
from fivefold.training.launch import train
from fivefold.training.resume import FIXED, check_resume

MODEL = {"vocab_size": 64, "dim": 16, "layers": 1, "heads": 2, "ffn": 16, "max_seq_len": 16}


def job(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Job:
    training = {"steps": 2, "global_batch": 2, "seq_len": 8} | sections.pop("training", {})
    data = {"source": "random"} | sections.pop("data", {})
    return Job.model_validate(
        {"model": MODEL | (model or {}), "data": data, "training": training, "run": {"tensorboard": False}}
        | sections
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    first = train(job(), run=made)
    again = train(job(), run=made)  # a finished run has nothing left to do
    assert (again.steps, again.loss, again.tokens) == (first.steps, first.loss, first.tokens)
    return made


OTHERS = {
    "data.source": job(data={"source": "stdlib"}),
    "data.tokenizer": job(data={"tokenizer": "bpe-300"}),
    "data.separate_documents": job(data={"separate_documents": False}),
    "data.text_field": job(data={"text_field": "content"}),
    "data.heldout": job(data={"heldout": 0.1}),
    "training.global_batch": job(training={"global_batch": 4}),
    "training.seq_len": job(training={"seq_len": 4}),
    "training.seed": job(training={"seed": 7}),
    "optimizer.name": job(optimizer={"name": "sgd"}),
    "model.ffn": job(model={"ffn": 32}),
}


@pytest.mark.parametrize("key", OTHERS)
def test_another_run_is_refused(folder: Path, key: str) -> None:
    (problem,) = check_resume(folder, resolve(OTHERS[key], 1))
    assert problem.key == key
    assert "but this run was started with" in problem.message


def test_every_key_that_must_stay_is_tried() -> None:
    """Of another module the test of own models knows."""
    assert {key for key in OTHERS if not key.startswith("model.")} == {*FIXED} - {"model.module"}


def test_a_command_refuses_what_the_folder_does(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"training\.seed: 7, but this run was started with 0"):
        train(OTHERS["training.seed"], run=folder)


def test_longer_and_faster_is_the_same_run(folder: Path) -> None:
    longer = job(
        training={"steps": 3, "precision": "fp32"}, optimizer={"lr": 1e-4}, model={"name": "renamed"}
    )
    assert train(longer, run=folder).steps == 3


def test_other_files_under_the_same_path_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    reading = job({"vocab_size": 260}, data={"source": str(text), "cache": str(tmp_path / "cache")})
    text.write_text("all work and no play " * 20)
    train(reading, run=tmp_path / "run")
    text.write_text("all play and no work " * 20)
    with pytest.raises(BadInput, match=r"text\.txt' is not what this run was trained on"):
        train(reading, run=tmp_path / "run")
    meant = reading.checkpoint.model_copy(update={"other_data": True})
    longer = reading.training.model_copy(update={"steps": 3})
    anyway = reading.model_copy(update={"checkpoint": meant, "training": longer})
    assert train(anyway, run=tmp_path / "run").steps == 3
