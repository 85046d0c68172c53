"""Whole runs, started as users start them: what they leave behind, and that they can be taken up again."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.config import Job, load
from fivefold.storage.folder import saved_steps
from fivefold.training.launch import train
from fivefold.training.learning_rate import learning_rate
from fivefold.training.metrics import read_metrics
from fivefold.training.run import Summary

PROMISED = {
    *("step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "tokens_per_s_per_device"),
    *("mfu", "hfu", "memory_gib", "attempt"),
}
SMALL = [
    *("--model.layers=2", "--model.dim=32", "--model.ffn=32", "--training.seq_len=16"),
    *("--training.global_batch=8", "--training.micro_batch=2"),
]


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Every line of the metrics, also of steps that were taken again."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers(record: dict[str, Any]) -> tuple[Any, ...]:
    """What must not depend on when and where a step ran."""
    return tuple(record.get(key) for key in ("step", "loss", "grad_norm", "lr", "tokens", "val_loss"))


# --- through the function, random tokens -------------------------------------------------------------------


@pytest.fixture(scope="module")
def random_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path, Summary]:
    """Five steps on two ranks under ZeRO-3, saved and validated every other step and at the end."""
    words = [
        *("--data.source=random", "--training.steps=5", "--optimizer.warmup=2", "--optimizer.ema=0.9"),
        *("--training.validate_every=2", "--training.validate_batches=1"),
        *("--checkpoint.every=2", "--checkpoint.keep=3"),
    ]
    job = load(None, "tiny", [*SMALL, *words])
    folder = tmp_path_factory.mktemp("random") / "run"
    return job, folder, train(job, nproc=2, run=folder)


def test_every_step_is_recorded_with_every_promised_figure(random_run: tuple[Job, Path, Summary]) -> None:
    job, folder, _ = random_run
    records = read_metrics(folder)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert record.keys() >= PROMISED
        step = record["step"]
        assert record["tokens"] == step * 8 * 16
        assert record["lr"] == learning_rate(job.optimizer, step, 5)
        assert record["attempt"] == 1
        assert math.isfinite(record["loss"])
        assert record["grad_norm"] > 0
        assert record["tokens_per_s"] == pytest.approx(8 * 16 / record["step_time_s"])
        assert record["tokens_per_s_per_device"] == pytest.approx(record["tokens_per_s"] / 2)
        assert record["memory_gib"] > 0
    assert records[0]["loss"] == pytest.approx(math.log(320), rel=0.05)
    assert [record["step"] for record in records if "val_loss" in record] == [2, 4, 5]


def test_the_summary_is_that_of_the_last_step(random_run: tuple[Job, Path, Summary]) -> None:
    _, folder, summary = random_run
    last = read_metrics(folder)[-1]
    assert (summary.steps, summary.tokens, summary.folder) == (5, 640, str(folder))
    assert (summary.loss, summary.val_loss) == (last["loss"], last["val_loss"])


def test_the_run_folder_holds_what_it_takes_to_go_on(random_run: tuple[Job, Path, Summary]) -> None:
    _, folder, _ = random_run
    assert saved_steps(folder) == [2, 4, 5]
    resolved = load(str(folder / "job.toml"))
    assert (resolved.layout.dp_shard, resolved.layout.zero, resolved.training.precision) == (2, 3, "fp32")
    assert resolved.run.folder == str(folder)
    assert list((folder / "tensorboard").iterdir())
    assert not list(folder.glob("errors/*"))


def test_steps_taken_again_from_a_checkpoint_are_the_same_to_the_last_bit(
    random_run: tuple[Job, Path, Summary], tmp_path: Path
) -> None:
    """As after a kill between the checkpoints of steps 2 and 4: steps 3 to 5 are taken a second time."""
    job, folder, summary = random_run
    run = tmp_path / "killed"
    shutil.copytree(folder, run)
    for step in (4, 5):
        shutil.rmtree(run / "checkpoints" / f"step-{step}")
    again = train(job, nproc=2, run=run)
    first, second = read_metrics(folder), lines_of(run)[5:]
    assert [(line["step"], line["attempt"]) for line in second] == [(3, 2), (4, 2), (5, 2)]
    assert [numbers(line) for line in second] == [numbers(line) for line in first[2:]]
    assert [record["attempt"] for record in read_metrics(run)] == [1, 1, 2, 2, 2]
    assert (again.loss, again.val_loss, again.tokens) == (summary.loss, summary.val_loss, summary.tokens)


def test_a_finished_run_started_again_tells_how_it_ended(
    random_run: tuple[Job, Path, Summary], tmp_path: Path
) -> None:
    job, folder, summary = random_run
    shutil.copytree(folder, tmp_path / "finished")
    again = train(job, nproc=2, run=tmp_path / "finished")
    assert (again.steps, again.tokens) == (summary.steps, summary.tokens)
    assert (again.loss, again.val_loss) == (summary.loss, summary.val_loss)
    assert len(lines_of(tmp_path / "finished")) == 5


# --- through the command line, text ------------------------------------------------------------------------

SENTENCES = "The first of {0} sentences, and {1} more to come, none of them as long as this paragraph.\n\n"


def fivefold(*words: str) -> dict[str, Any]:
    """What the command says in JSON."""
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_command_line_run_on_text_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    for number in range(20):
        text = "".join(SENTENCES.format(number, more) for more in range(10))
        (tmp_path / f"{number}.txt").write_text(text)
    words = [
        *("--data.source", str(tmp_path / "*.txt"), "--data.heldout=0.2", f"--data.cache={tmp_path}/cache"),
        *("--training.validate_every=3", "--training.validate_batches=2", "--optimizer.schedule=constant"),
        *("--layout.zero", "0", "--training.precision", "bf16", "--optimizer.warmup", "2"),
    ]
    run = tmp_path / "run"
    first = fivefold(
        "train", "--preset", "tiny", "--nproc=2", *SMALL, *words, "--training.steps=3", f"--run={run}"
    )
    assert (first["steps"], first["folder"]) == (3, str(run))
    second = fivefold("train", str(run / "job.toml"), "--training.steps", "6")
    assert (second["steps"], second["folder"]) == (6, str(run))

    # The job that the run left behind is the whole job: another folder, the same numbers, in one go.
    whole = train(load(str(run / "job.toml")), run=tmp_path / "whole")
    expected, found = read_metrics(tmp_path / "whole"), lines_of(run)
    assert [(line["step"], line["attempt"]) for line in found] == [
        *((i, 1) for i in (1, 2, 3)),
        (4, 2),
        (5, 2),
        (6, 2),
    ]
    assert [numbers(line) for line in found] == [numbers(line) for line in expected]
    assert all(line.keys() >= PROMISED for line in found)
    assert [line["step"] for line in found if "val_loss" in line] == [3, 6]
    assert second["loss"] == whole.loss == expected[-1]["loss"]
    assert found[-1]["val_loss"] < found[0]["loss"]
