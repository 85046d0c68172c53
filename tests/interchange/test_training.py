"""Runs that start from the weights of `transformers`, and hand theirs back to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from fivefold.api.metrics import read_metrics
from fivefold.config import Job, job_with, resolve
from fivefold.interchange.bring import bring_in
from fivefold.interchange.export import export
from fivefold.training.build import build
from fivefold.training.checkpoint import load_latest
from fivefold.training.launch import train
from fivefold.training.ranks import run_ranks
from fivefold.training.run import corpus_of
from tests.interchange.programs import first_step, started
from tests.interchange.zoo import opened, saved, tensors

SETTINGS: dict[str, Any] = {
    "data.source": "random",
    "data.tokenizer": "bytes",
    "training.global_batch": 8,
    "training.seq_len": 32,
    "training.precision": "fp64",
    "optimizer.warmup": 0,
    "optimizer.lr": 1e-2,
}
UNBALANCED = {"training.balance": "none"}


def first_batch(job: Job, step: int) -> Any:
    """The whole batch of step `step` (from 1)."""
    with corpus_of(job).train_loader(8, 8, rank=0, ranks=1, start_step=step - 1) as loader:
        return next(iter(loader))[0]


def their_loss(folder: Path, job: Job, step: int) -> float:
    """What `transformers` makes of a batch, in float64 but for what it always does in float32."""
    batch = first_batch(job, step)
    assert batch.documents is None
    with torch.no_grad():
        logits = opened(folder).double()(batch.tokens).logits
    return float(cross_entropy(logits.flatten(0, 1), batch.targets.flatten()))


# --- through a run, and back ------------------------------------------------------------------------------


def check_next_loss(name: str, tmp_path: Path, tolerance: float, more: dict[str, Any] | None = None) -> None:
    """Import, train 5 steps under tp 2 x pp 2, export: `transformers` has the loss of step 6."""
    run, out = tmp_path / "run", tmp_path / "out"
    bring_in(saved(name, tmp_path / "theirs"), run)
    layout = {"layout.tp": 2, "layout.pp": 2, "training.micro_batch": 2, "optimizer.ema": 0.5}
    length = {"training.steps": 6, "checkpoint.every": 5}
    job = job_with(SETTINGS, layout, length, more or {}, path=str(run / "job.toml"))
    train(job, nproc=4, run=run)
    export(run, out, step=5, dtype="fp64")
    losses = [metric.loss for metric in read_metrics(run)]
    assert losses[0] == pytest.approx(their_loss(tmp_path / "theirs", job, 1), rel=1e-6)
    assert losses[5] == pytest.approx(their_loss(out, job, 6), rel=tolerance)
    export(run, tmp_path / "average", step=5, dtype="fp64", average=True)
    assert abs(their_loss(tmp_path / "average", job, 6) - losses[5]) > 1e-4


def test_transformers_computes_the_loss_of_the_next_step(tmp_path: Path) -> None:
    """GPT-2: biased, tied over the stages, its fused tensor split over tp; and all of it in float64."""
    check_next_loss("gpt2", tmp_path, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "mixtral"])
def test_transformers_computes_the_loss_of_the_next_step_in_every_family(name: str, tmp_path: Path) -> None:
    """To 1e-6: their RMS norms and routers work in float32 whatever the model's dtype is."""
    check_next_loss(name, tmp_path, 1e-6, UNBALANCED if name == "mixtral" else {})


def test_an_average_begins_at_the_weights_that_were_brought_in(tmp_path: Path) -> None:
    bring_in(saved("gpt2", tmp_path / "theirs"), tmp_path / "run")
    job = job_with(SETTINGS, {"optimizer.ema": 0.9}, path=str(tmp_path / "run" / "job.toml"))
    built = build(resolve(job, 1), torch.device("cpu"))
    before = [average.clone() for average in built.optimizer.ema or []]
    load_latest(built, tmp_path / "run")
    for first, average, master in zip(before, built.optimizer.ema or [], built.weights.masters, strict=True):
        assert torch.equal(average, master)
        assert average.ndim == 1 or not torch.equal(average, first)


# --- under every layout -----------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero3": ("llama", {"layout.zero": 3}),
    "zero1 tied": ("qwen3", {"layout.zero": 1}),
    "zero0": ("mistral", {"layout.zero": 0}),
    "tp": ("qwen2", {"layout.tp": 2}),
    "tp fused": ("gpt2", {"layout.tp": 2}),
    "pp": ("gpt2-untied", {"layout.pp": 2, "training.micro_batch": 2}),
    "pp tied": ("llama-biased", {"layout.pp": 2, "training.micro_batch": 2}),
    "cp": ("llama", {"layout.cp": 2}),
    "ep": ("mixtral", {"layout.ep": 2, **UNBALANCED}),
    "zero3 experts": ("mixtral", {"layout.zero": 3, **UNBALANCED}),
    "tp experts": ("mixtral", {"layout.tp": 2, **UNBALANCED}),
}


def job_of(folder: Path, more: dict[str, Any], ranks: int) -> Job:
    return resolve(job_with(SETTINGS, more, {"model.weights": str(folder)}), ranks)


def check_layouts(names: list[str], tmp_path: Path) -> None:
    folders = {family: tmp_path / "theirs" / family for family in {LAYOUTS[name][0] for name in names}}
    runs = tmp_path / "runs"
    for family, folder in folders.items():
        bring_in(saved(family, folder), runs / family)
    jobs = {name: job_of(folders[LAYOUTS[name][0]], LAYOUTS[name][1], 2) for name in names}
    split = run_ranks(started, 2, jobs, {name: runs / LAYOUTS[name][0] for name in names})[0]
    for name in names:
        family, settings = LAYOUTS[name]
        alone = job_of(folders[family], UNBALANCED if UNBALANCED.items() <= settings.items() else {}, 1)
        expected = first_step(alone, build(alone, torch.device("cpu")))
        assert expected[0] == pytest.approx(their_loss(folders[family], alone, 1), rel=1e-6)
        for outcome in split[name]:
            assert outcome == pytest.approx(expected, rel=1e-11), name


def test_a_job_starts_from_weights_under_zero_3_ep_and_tp(tmp_path: Path) -> None:
    check_layouts(["zero3", "ep", "tp fused", "pp tied"], tmp_path)


@pytest.mark.slow
def test_a_job_starts_from_weights_under_every_layout(tmp_path: Path) -> None:
    check_layouts(list(LAYOUTS), tmp_path)


# --- what wins, and what is kept --------------------------------------------------------------------------


def test_a_checkpoint_goes_before_weights_which_may_be_gone(tmp_path: Path) -> None:
    theirs, run = saved("gpt2", tmp_path / "theirs"), tmp_path / "run"
    settings = SETTINGS | {"model.weights": str(theirs), "training.precision": "fp32"}
    train(job_with(settings, {"training.steps": 1, "optimizer.name": "sgd"}), run=run)
    theirs.rename(tmp_path / "elsewhere")
    job = job_with({"training.steps": 2}, path=str(run / "job.toml"))
    train(job, run=run)
    assert [metric.step for metric in read_metrics(run)] == [1, 2]
    told = export(run, tmp_path / "out")
    assert told.step == 2
    before, after = tensors(tmp_path / "elsewhere"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(before[name][2] != after[name][2] for name in before if name.endswith("weight"))
    opened(tmp_path / "out")
