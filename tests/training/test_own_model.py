"""A user's own model, trained by live ranks: the numbers of one process, the ledger's bytes, runs resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fivefold
from fivefold.cli import app
from fivefold.config import Job, load
from fivefold.problems import BadInput
from fivefold.replay.account import account
from fivefold.training.launch import prepare
from fivefold.training.metrics import read_metrics
from fivefold.training.ranks import run_ranks
from fivefold.training.weights import local
from fivefold.verification import gradient_error
from tests.axes.test_account import live
from tests.cases import Case, built_on_cpu, gradients, save
from tests.models.own_models import Good

ROOT = Path(__file__).parents[2]
STEPS = 3
TRAINING: dict[str, Any] = {"global_batch": 8, "seq_len": 16, "micro_batch": 1}
OWN = Case("own", training=TRAINING, spec={"module": "tests.models.own_models:Good"})


def case(name: str, layout: dict[str, Any], ranks: int, **training: Any) -> Case:
    degrees = {"dp_replicate": 1, "dp_shard": 1} | layout
    return replace(OWN, name=name, ranks=ranks, layout=degrees, training=TRAINING | training)


LAYOUTS = {
    layout.name: layout
    for layout in (
        case("zero0", {"dp_replicate": 2, "zero": 0}, 2),
        case("zero1", {"dp_shard": 2, "zero": 1}, 2),
        case("zero2", {"dp_shard": 2, "zero": 2}, 2, recompute="selective"),
        case("zero3", {"dp_shard": 2, "zero": 3}, 2, recompute="every-3"),
        case("pp zbv", {"pp": 2, "schedule": "zbv"}, 2),
        case("pp zero1", {"pp": 2, "dp_shard": 2, "zero": 1}, 4),
        case("pp zero3", {"pp": 2, "dp_shard": 2, "zero": 3}, 4, recompute="full"),
        case("pp zero0", {"pp": 2, "dp_replicate": 2, "zero": 0}, 4),
        case("hsdp", {"dp_replicate": 2, "dp_shard": 2, "zero": 3}, 4),
    )
}


def sharded(zero: int, precision: str) -> Case:
    layout = {"dp_shard" if zero else "dp_replicate": 2, "zero": zero, "bucket_mb": 0.02}
    return case(f"zero{zero} {precision}", layout, 2, precision=precision)


COUNTED = {
    counted.name: counted
    for counted in (
        sharded(0, "bf16"),
        sharded(1, "fp32"),
        sharded(2, "bf16"),
        sharded(3, "fp32"),
        sharded(3, "bf16"),
        case("pp zero1", {"pp": 2, "dp_shard": 2, "zero": 1}, 4, precision="bf16"),
        case("pp zero3", {"pp": 2, "dp_shard": 2, "zero": 3}, 4, precision="fp32"),
    )
}


def marked(cases: dict[str, Case]) -> list[Any]:
    """Four ranks are slow to start."""
    return [pytest.param(n, marks=[pytest.mark.slow] if c.ranks == 4 else []) for n, c in cases.items()]


@cache
def reference() -> dict[str, Any]:
    return gradients(OWN.job(), STEPS)


def on_a_rank(world: Any, jobs: list[Job], counted: list[Job]) -> tuple[list[dict[str, Any]], list[Any]]:
    return [gradients(job, STEPS) for job in jobs], [live(job) for job in counted]


def found(ranks: int) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Gradients of rank 0 by layout, and what each rank held and sent by counted layout."""
    result = launched(ranks)
    if isinstance(result, Exception):
        raise result
    computed, lived = result
    return computed, lived


@cache
def launched(ranks: int) -> Any:
    """All cases of so many ranks; a launch that failed is not tried again for each of them."""
    names = [name for name, one in LAYOUTS.items() if one.ranks == ranks]
    counted = [name for name, one in COUNTED.items() if one.ranks == ranks]
    jobs, counted_jobs = [LAYOUTS[n].job() for n in names], [COUNTED[n].job() for n in counted]
    try:
        every_rank = run_ranks(on_a_rank, ranks, jobs, counted_jobs)
    except Exception as error:
        return error
    computed = dict(zip(names, every_rank[0][0], strict=True))
    return computed, {name: [lived[i] for _, lived in every_rank] for i, name in enumerate(counted)}


@pytest.mark.parametrize("name", marked(LAYOUTS))
def test_every_gradient_and_a_few_steps_are_those_of_one_process(name: str) -> None:
    result, true = found(LAYOUTS[name].ranks)[0][name], reference()
    error, parameter = gradient_error(result["gradients"], true["gradients"])
    assert error <= 1e-11, f"{parameter} is off by {error:.1e}"
    assert len(true["gradients"]) == len(list(Good().parameters()))
    assert result["loss"] == pytest.approx(true["loss"], rel=1e-11)
    assert result["norm"] == pytest.approx(true["norm"], rel=1e-11)
    assert len({loss for loss, _ in true["curve"]}) == STEPS
    for (loss, norm), (true_loss, true_norm) in zip(result["curve"], true["curve"], strict=True):
        assert loss == pytest.approx(true_loss, rel=1e-9)
        assert norm == pytest.approx(true_norm, rel=1e-9)


def test_one_process_computes_what_plain_torch_does() -> None:
    """Initial values, buffers, documents and loss: the module by hand, on the same batch."""
    from tests.cases import batches

    job = OWN.job()
    with batches(job, built_on_cpu(job)) as loader:
        micro_batches = next(iter(loader))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.training.seed)
        model = Good().double()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for batch in micro_batches:
        assert batch.documents is not None
        x = model.embedding(batch.tokens)
        for block in model.blocks:
            x = block(x, batch.documents)
        loss = torch.nn.functional.cross_entropy(
            model.head(x).flatten(0, 1), batch.targets.flatten(), ignore_index=-100, reduction="sum"
        )
        total, tokens = total + loss, tokens + batch.valid
    (total / tokens).backward()
    assert reference()["loss"] == pytest.approx(total.item() / tokens, rel=1e-12)
    true = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    error, parameter = gradient_error(reference()["gradients"], true)
    assert error <= 1e-12, parameter


@pytest.mark.parametrize("name", marked(COUNTED))
def test_the_ledger_holds(name: str) -> None:
    for lived in found(COUNTED[name].ranks)[1][name]:
        ledger = account(COUNTED[name].job(), lived["place"])
        assert lived["traffic"] == ledger.traffic()
        assert lived["rest"] == {role: ledger.rest(role) for role in ("weights", "gradients", "states")}
        assert lived["peak"] == {role: ledger.peak(role) for role in ("weights", "gradients")}


def buffer_dtypes(world: Any, jobs: list[Job]) -> list[set[torch.dtype]]:
    return [{buffer.dtype for buffer in built_on_cpu(job).model.buffers()} for job in jobs]


def test_buffers_compute_in_the_dtype_of_the_weights_under_every_zero() -> None:
    for dtypes in run_ranks(buffer_dtypes, 2, [sharded(zero, "bf16").job() for zero in range(4)]):
        assert dtypes == [{torch.bfloat16}] * 4


# --- whole runs --------------------------------------------------------------------------------------------

WORDS = ["--model.module", "examples/own_model.py:OwnModel", "--data.separate_documents", "false"]
SHORT = ["--data.source", "random", "--training.steps", "4", "--training.global_batch", "8"]
SHORT += ["--training.seq_len", "16", "--run.tensorboard", "false", "--optimizer.warmup", "0"]
SHORT += ["--optimizer.schedule", "constant", "--optimizer.lr", "0.003", "--training.precision", "fp64"]


def test_the_example_trains_by_the_command_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = ["--layout.pp", "2", "--run", str(tmp_path / "run"), "--training.validate_every", "4"]
    first = CliRunner().invoke(app, ["train", *WORDS, *SHORT, *run])
    assert first.exit_code == 0, first.output
    monkeypatch.chdir(tmp_path)
    # The job of that run finds its model from any folder; here it goes on with another split.
    written = load(str(tmp_path / "run" / "job.toml"))
    longer = written.model_copy(
        update={
            "training": written.training.model_copy(update={"steps": 6, "micro_batch": None}),
            "layout": type(written.layout)(dp_shard=2),
        }
    )
    assert fivefold.train(longer).steps == 6
    steps = read_metrics(tmp_path / "run")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    straight = load(overrides=[*WORDS[2:], *SHORT, "--training.steps", "6", "--checkpoint.keep", "0"])
    summary = fivefold.train(straight, nproc=1, run=tmp_path / "straight", model=example())
    alone = [line["loss"] for line in read_metrics(tmp_path / "straight")]
    assert summary.loss == alone[-1]
    assert len(set(alone)) == 6
    assert [line["loss"] for line in steps] == pytest.approx(alone, rel=1e-9)


def example() -> Any:
    from fivefold.models.own.reference import found as find

    return find(f"{ROOT}/examples/own_model.py:OwnModel")


def restarted(world: Any, job: Job, folder: Path) -> list[bool]:
    """Whether each master weight is bit for bit the same after saving and loading into another model."""
    from fivefold.training.checkpoint import Progress, load_latest

    built = built_on_cpu(job)
    with torch.no_grad():
        for master in built.weights.masters:
            master.add_(1.0)
    save(built, folder, Progress(1, 1), keep=1)
    other = built_on_cpu(job)
    before = [local(master).clone() for master in other.weights.masters]
    assert load_latest(other, folder) is not None
    pairs = zip(built.weights.masters, other.weights.masters, before, strict=True)
    return [torch.equal(a, b) and not torch.equal(a, was) for a, b, was in pairs if a.numel()]


def test_a_checkpoint_brings_back_every_shard(tmp_path: Path) -> None:
    for same in run_ranks(restarted, 2, LAYOUTS["zero3"].job(), tmp_path):
        assert same
        assert all(same)


def test_a_run_is_not_taken_up_with_another_module(tmp_path: Path) -> None:
    words = [*WORDS[2:], *SHORT, "--training.steps", "1", "--run.folder", str(tmp_path)]
    fivefold.train(load(overrides=words), nproc=1, model=example())
    changed = load(overrides=["--model.module", "tests.models.own_models:Plain", *words])
    with pytest.raises(BadInput, match=r"model\.module: .*but this run was started with"):
        prepare(changed, 1, "cpu", None)


def test_verify_says_same_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    layout = ["--layout.pp", "2", "--layout.zero", "0"]
    told = CliRunner().invoke(app, ["verify", *WORDS, *layout, "--json"])
    assert told.exit_code == 0, told.output
    answer = json.loads(told.stdout)
    assert answer["ok"] is True
    assert 0 < answer["worst_gradient_error"] < 1e-12
    assert answer["parameters"] == 1 + 4 * 6 + 4
    job = load(overrides=[*WORDS[2:], "--layout.dp_shard", "2", "--layout.zero", "2"])
    verdict = fivefold.verify(job, model=example())
    assert verdict.ok, verdict.sentence()
    assert verdict.layout == "dp_shard2 x zero2"
