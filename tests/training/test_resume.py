"""A run folder is taken up only by a job that continues it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.config import Job
from fivefold.problems import BadInput
from fivefold.training.launch import train

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
    train(job(), run=made)
    return made


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("training.seed", job(training={"seed": 7})),
        ("training.global_batch", job(training={"global_batch": 4})),
        ("training.seq_len", job(training={"seq_len": 4})),
        ("data.separate_documents", job(data={"separate_documents": False})),
        ("optimizer.name", job(optimizer={"name": "sgd"})),
        ("model.ffn", job(model={"ffn": 32})),
    ],
)
def test_another_run_is_refused(folder: Path, key: str, changed: Job) -> None:
    with pytest.raises(BadInput) as caught:
        train(changed, run=folder)
    assert [problem.key for problem in caught.value.problems] == [key]


def test_longer_and_faster_is_the_same_run(folder: Path) -> None:
    longer = job(
        training={"steps": 3, "precision": "fp32"}, optimizer={"lr": 1e-4}, model={"name": "renamed"}
    )
    assert train(longer, run=folder).steps == 3


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    first = train(job(), run=tmp_path)
    again = train(job(), run=tmp_path)
    assert (again.steps, again.loss, again.tokens) == (first.steps, first.loss, first.tokens)
