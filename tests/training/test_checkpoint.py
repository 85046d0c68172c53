"""A run that was saved, ended and taken up again is bit for bit the run that was never stopped."""

from __future__ import annotations

import atexit
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from fivefold.api.metrics import read_metrics
from fivefold.comm.world import World, single_world
from fivefold.config import Job, dump_toml
from fivefold.problems import BadInput
from fivefold.storage.folder import saved_steps
from fivefold.storage.manifest import read_manifest
from fivefold.training.build import Built, build
from fivefold.training.checkpoint import Progress, Saver, load_latest
from fivefold.training.learning_rate import learning_rate
from fivefold.training.ranks import run_ranks
from fivefold.training.run import TrainingRun
from fivefold.training.weights import local
from tests.cases import SPEC, TIED, Case, batches, built_on_cpu, save

HALF, WHOLE = 3, 4  # an odd number: a bias that went up and down again would be back where it began
SGD = {"name": "sgd", "lr": 0.1}
STATES = {"states": "bf16"}
MUON = {"name": "muon", "lr": 1e-2}
OVERFLOWING: dict[str, Any] = {"precision": "fp16", "loss_scale": 2.0**21}  # too large for the first step
GENTLE = {"lr": 1e-3}
ONE_ROW = SPEC | {"dim": 8, "heads": 8, "kv_heads": 4, "positions": "learned", "qk_norm": True}  # head_dim 1
MOE = SPEC | {"layers": 2, "experts": 4, "experts_per_token": 2}
INT8 = {"compress": "int8"}
HSDP = {"dp_replicate": 2, "dp_shard": 2, "zero": 3}

CASES = {
    case.name: case
    for case in (
        Case("one process", 1, optimizer={"ema": 0.9}),
        Case("one process bf16", 1, training={"precision": "bf16"}),
        Case("one process bf16 states", 1, training={"precision": "bf16"}, optimizer=STATES),
        Case("one process fp16", 1, training=OVERFLOWING, optimizer=GENTLE),
        Case("one process sgd", 1, optimizer=SGD, spec=TIED),
        Case("zero0", 2, {"zero": 0}, {"micro_batch": 2}),
        Case("zero0 bf16 ema", 2, {"zero": 0}, {"precision": "bf16"}, {"ema": 0.9}),
        Case("zero0 fp16", 2, {"zero": 0}, OVERFLOWING, optimizer=GENTLE),
        Case("zero1 sgd", 2, {"zero": 1}, optimizer=SGD),
        Case("zero2", 2, {"zero": 2}, {"micro_batch": 2}, spec=TIED),
        Case("zero3", 2, {"zero": 3}, {"micro_batch": 2}, {"ema": 0.9}),
        Case("zero3 bf16", 2, {"zero": 3}, {"precision": "bf16"}),
        Case("zero3 fp16", 2, {"zero": 3}, OVERFLOWING, optimizer=GENTLE),
        Case("zero3 bf16 states", 2, {"zero": 3}, {"precision": "bf16"}, STATES | {"ema": 0.9}),
        Case("zero3 8-bit states", 2, {"zero": 3}, {"precision": "bf16"}, {"states": "int8"}),
        Case("zero2 muon 8-bit states", 2, {"zero": 2}, {"precision": "bf16"}, MUON | {"states": "int8"}),
        Case("zero3 empty shards", 2, {"zero": 3}, spec=ONE_ROW),
        Case("tp", 2, {"tp": 2}, {"micro_batch": 2}, {"ema": 0.9}),
        Case("tp tied bf16", 2, {"tp": 2}, {"precision": "bf16"}, spec=TIED),
        Case("pp tied", 2, {"pp": 2}, {"micro_batch": 2}, spec=TIED),
        Case("zbv tied states", 2, {"pp": 2, "schedule": "zbv"}, {"precision": "fp32"}, STATES, TIED),
        Case("zbv tied", 2, {"pp": 2, "schedule": "zbv"}, {"micro_batch": 2}, {"ema": 0.9}, spec=TIED),
        Case("cp zero3", 2, {"cp": 2, "zero": 3}, {"micro_batch": 2}),
        Case("ep", 2, {"dp_shard": 2, "ep": 2}, {"balance": "bias", "balance_rate": 0.01}, spec=MOE),
        Case("int8 zero0 fp16", 2, {"zero": 0}, OVERFLOWING, GENTLE, communication=INT8),
        Case("int8 zero3", 2, {"zero": 3}, {"micro_batch": 2, "precision": "fp32"}, communication=INT8),
        Case("tp zero3", 4, {"dp_shard": 2, "tp": 2}, {"micro_batch": 2}),
        Case("tp zero3 int8", 4, {"dp_shard": 2, "tp": 2}, {"precision": "bf16"}, communication=INT8),
        Case("tp zero3 int8 hsdp", 4, HSDP, {"precision": "fp32", "micro_batch": 1}, communication=INT8),
    )
}


@dataclass(frozen=True)
class Reached:
    """Where a rank is after some steps: what it computed on the way, and all that it keeps."""

    losses: list[tuple[float, float]]
    masters: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    scale: tuple[float, int] | None
    whole: dict[str, torch.Tensor]


def advance(job: Job, built: Built, start: int, end: int) -> Reached:
    losses = []
    with batches(job, built, start) as loader:
        for step in range(start + 1, end + 1):
            lr = learning_rate(job.optimizer, step, WHOLE)
            result = built.step(next(loader), lr, step)
            losses.append((result.loss, result.grad_norm))
    weights, scale = built.weights, built.step.scale
    averages = built.optimizer.ema or weights.masters
    return Reached(
        losses,
        {name: master.detach().clone() for name, master in zip(weights.names, weights.masters, strict=True)},
        {
            f"{name} {kind}": local(value).clone()
            for name, kinds in built.optimizer.state().items()
            for kind, value in kinds.items()
        }
        | {f"{name} averaged": value.clone() for name, value in zip(weights.names, averages, strict=True)}
        | {name: buffer.clone() for part in built.parts for name, buffer in part.named_buffers()}
        | {name: kept.read().clone() for name, (_, kept) in built.step.residuals.kept.items()},
        None if scale is None else (scale.value, scale.good_steps),
        weights.whole(weights.masters),
    )


def progress_of(built: Built, step: int) -> Progress:
    scale = built.step.scale
    return Progress(step, 128 * step, *((scale.value, scale.good_steps) if scale else ()))


def straight(world: World, jobs: dict[str, Job], folder: Path) -> dict[str, tuple[Reached, Reached]]:
    """Where each job is when it is saved, and where it is in the end: it goes on without looking back."""
    found = {}
    for name, job in jobs.items():
        built = built_on_cpu(job)
        half = advance(job, built, 0, HALF)
        save(built, folder / name, progress_of(built, HALF), keep=2)
        found[name] = half, advance(job, built, HALF, WHOLE)
    return found


def second_half(world: World, jobs: dict[str, Job], folder: Path) -> dict[str, tuple[Progress, Reached]]:
    """Take up each job from the checkpoint of the same name, perhaps of another layout, and go on."""
    found = {}
    for name, job in jobs.items():
        built = built_on_cpu(job)
        progress, damaged = load_latest(built, folder / name.partition(" -> ")[0])
        assert progress is not None
        assert damaged == []
        found[name] = progress, advance(job, built, progress.step, WHOLE)
    return found


def marked(names: Iterable[str]) -> list[Any]:
    """Four ranks are slow to start; two of them see most."""
    return [pytest.param(n, marks=[pytest.mark.slow] if n.startswith("tp zero3") else []) for n in names]


def jobs_on(ranks: int) -> dict[str, Job]:
    return {name: case.job() for name, case in CASES.items() if case.ranks == ranks}


@cache
def saved(ranks: int) -> tuple[Path, list[dict[str, tuple[Reached, Reached]]]]:
    """All cases on so many ranks in one launch, half-way and at the end, and where they were saved."""
    folder = Path(mkdtemp(prefix="fivefold-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder, run_ranks(straight, ranks, jobs_on(ranks), folder)


@cache
def resumed(ranks: int) -> list[dict[str, tuple[Progress, Reached]]]:
    return run_ranks(second_half, ranks, jobs_on(ranks), saved(ranks)[0])


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name].dtype == expected[name].dtype
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("name", marked(CASES))
def test_a_resumed_run_is_bit_identical(name: str) -> None:
    ranks = CASES[name].ranks
    for rank in range(ranks):
        _, expected = saved(ranks)[1][rank][name]
        progress, after = resumed(ranks)[rank][name]
        assert (progress.step, progress.tokens) == (HALF, 128 * HALF)
        assert repr(after.losses) == repr(expected.losses)
        assert_equal(after.masters, expected.masters)
        assert_equal(after.states, expected.states)
        assert after.scale == expected.scale
    assert len(set(after.losses)) == WHOLE - HALF


@pytest.mark.parametrize("name", [name for name in CASES if "fp16" in name])
def test_the_loss_scale_is_taken_up(name: str) -> None:
    """The case must have something to restore: a scale that has been halved, and steps that were good."""
    ranks = CASES[name].ranks
    before, _ = saved(ranks)[1][0][name]
    progress, after = resumed(ranks)[0][name]
    assert before.scale is not None
    assert before.scale[0] < OVERFLOWING["loss_scale"]
    assert (progress.loss_scale, progress.good_steps) == before.scale
    assert after.scale is not None
    assert before.scale[1] > 0
    assert after.scale[1] > 0


# --- under another layout ----------------------------------------------------------------------------------

MOVES = {
    name: (case, saved_on)
    for name, saved_on, case in (
        ("zero3 -> zero0", 2, Case("", 2, {"zero": 0}, optimizer={"ema": 0.9})),
        ("zero3 -> zero1", 2, Case("", 2, {"zero": 1}, optimizer={"ema": 0.9})),
        ("zero3 -> one process", 2, Case("", 1, {}, optimizer={"ema": 0.9})),
        ("zero0 -> zero2", 2, Case("", 2, {"zero": 2})),
        ("zero1 sgd -> zero3", 2, Case("", 2, {"zero": 3}, optimizer=SGD)),
        ("tp -> one process", 2, Case("", 1, optimizer={"ema": 0.9})),
        ("tp -> zero3", 2, Case("", 2, {"zero": 3}, optimizer={"ema": 0.9})),
        ("zbv tied -> tp", 2, Case("", 2, {"tp": 2}, optimizer={"ema": 0.9}, spec=TIED)),
        ("pp tied -> one process", 2, Case("", 1, spec=TIED)),
        ("cp zero3 -> pp", 2, Case("", 2, {"pp": 2}, {"micro_batch": 2})),
        ("ep -> one process", 2, Case("", 1, {}, {"balance": "bias", "balance_rate": 0.01}, spec=MOE)),
        ("tp zero3 -> one process", 4, Case("", 1)),
        ("zero0 fp16 -> zero3", 2, Case("", 2, {"zero": 3}, OVERFLOWING, optimizer=GENTLE)),
        ("one process -> tp", 1, Case("", 2, {"tp": 2}, optimizer={"ema": 0.9})),
        ("one process -> zero3", 1, Case("", 2, {"zero": 3}, optimizer={"ema": 0.9})),
    )
}


@cache
def moved(saved_on: int, ranks: int) -> dict[str, tuple[Progress, Reached]]:
    jobs = {n: case.job() for n, (case, on) in MOVES.items() if (on, case.ranks) == (saved_on, ranks)}
    return run_ranks(second_half, ranks, jobs, saved(saved_on)[0])[0]


@pytest.mark.parametrize("name", marked(MOVES))
def test_a_checkpoint_loads_under_another_layout(name: str) -> None:
    case, saved_on = MOVES[name]
    before, expected = saved(saved_on)[1][0][name.partition(" -> ")[0]]
    progress, after = moved(saved_on, case.ranks)[name]
    assert after.scale == expected.scale
    if "fp16" in name:  # rounds otherwise, and overflows alike
        assert (progress.loss_scale, progress.good_steps) == before.scale
        assert [loss for loss, _ in after.losses] == pytest.approx(
            [loss for loss, _ in expected.losses], rel=1e-2
        )
        return
    for (loss, norm), (true_loss, true_norm) in zip(after.losses, expected.losses, strict=True):
        assert loss == pytest.approx(true_loss, rel=1e-12)
        assert norm == pytest.approx(true_norm, rel=1e-11)
    for parameter, value in after.whole.items():
        torch.testing.assert_close(value, expected.whole[parameter], rtol=1e-9, atol=1e-12)


# --- a whole run -------------------------------------------------------------------------------------------


def run_to(job: Job, folder: Path, step: int, seen: list[torch.Tensor]) -> None:
    """Train as far as `step`, as the loop of a run does; what it is given to read is added to `seen`."""
    with TrainingRun(job, single_world("cpu"), folder) as run:
        given = run.batches

        def noted() -> Iterator[Any]:
            for batch in given:
                seen.extend(micro.tokens.clone() for micro in batch)
                yield batch

        run.batches = noted()  # type: ignore[assignment]
        while run.progress.step < step:
            run.advance()


def test_validation_averages_and_recomputation_do_not_tell_a_resumed_run(tmp_path: Path) -> None:
    """Losses, samples, and every byte of the last checkpoint are those of a run that was never stopped."""
    training = {"steps": WHOLE, "validate_every": 2, "validate_batches": 1, "recompute": "every-2"}
    job = Case("", spec=SPEC, training=training | {"micro_batch": 4}, optimizer={"ema": 0.9}).job()
    job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"every": HALF})})
    straight: list[torch.Tensor] = []
    halves: list[torch.Tensor] = []
    run_to(job, tmp_path / "straight", WHOLE, straight)
    run_to(job, tmp_path / "halves", HALF, halves)
    run_to(job, tmp_path / "halves", WHOLE, halves)
    assert len(straight) == len(halves) == 2 * WHOLE
    assert all(torch.equal(a, b) for a, b in zip(straight, halves, strict=True))
    one, other = (
        [(step.loss, step.grad_norm, step.val_loss) for step in read_metrics(tmp_path / name)]
        for name in ("straight", "halves")
    )
    assert repr(one) == repr(other)
    files = [
        (tmp_path / name / "checkpoints" / f"step-{WHOLE}" / "rank-00000.safetensors").read_bytes()
        for name in ("straight", "halves")
    ]
    assert files[0] == files[1]


# --- the folder --------------------------------------------------------------------------------------------


def small(**changes: Any) -> Built:
    spec = SPEC | {"layers": 1} | changes.pop("spec", {})
    return build(Case("small", spec=spec, **changes).job(), torch.device("cpu"))


@pytest.mark.filterwarnings("error")
def test_one_process_saves_and_loads_without_a_warning(tmp_path: Path) -> None:
    save(small(), tmp_path, Progress(1, 100), keep=1)
    load_latest(small(), tmp_path)


def test_a_run_is_left_when_its_last_checkpoint_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring = os.fsync

    def slowly(file: int) -> None:
        time.sleep(0.1)
        bring(file)

    monkeypatch.setattr("os.fsync", slowly)
    job = Case("small", spec=SPEC | {"layers": 1}, training={"steps": 2}).job()
    with TrainingRun(job, single_world("cpu"), tmp_path) as run:
        while not run.done:
            run.advance()
    assert saved_steps(tmp_path) == [2]
    assert [thread.name for thread in threading.enumerate() if thread.name == "checkpoint"] == []


@pytest.mark.parametrize(
    ("keeping", "steps"),
    [
        ({"minutes": 1e-9, "keep": 9}, [1, 2, 3, 4, 5]),
        ({"minutes": 0, "keep": 9}, [5]),
        ({"minutes": 60, "keep": 9}, [5]),
        ({"every": 1, "keep": 1, "keep_every": 2}, [2, 4, 5]),
    ],
)
def test_a_run_saves_by_time_and_steps(tmp_path: Path, keeping: dict[str, Any], steps: list[int]) -> None:
    job = Case("small", spec=SPEC | {"layers": 1}, training={"steps": 5}).job()
    often = job.checkpoint.model_copy(update=keeping)
    with TrainingRun(job.model_copy(update={"checkpoint": often}), single_world("cpu"), tmp_path) as run:
        while not run.done:
            run.advance()
    assert saved_steps(tmp_path) == steps


def test_without_a_checkpoint_there_is_nothing_to_take_up(tmp_path: Path) -> None:
    assert load_latest(small(), tmp_path) == (None, [])


def test_only_the_newest_stay_and_the_newest_is_loaded(tmp_path: Path) -> None:
    built = small()
    for step in (8, 9, 10, 11):
        with torch.no_grad():
            built.weights.masters[0].fill_(step)
        save(built, tmp_path, Progress(step, 100 * step, loss=2.5), keep=2)
    assert saved_steps(tmp_path) == [10, 11]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest",
        "step-10",
        "step-11",
    ]
    fresh = small()
    assert load_latest(fresh, tmp_path) == (Progress(11, 1100, loss=2.5), [])
    assert torch.equal(fresh.weights.masters[0], torch.full_like(fresh.weights.masters[0], 11))


def test_a_checkpoint_that_was_not_finished_is_ignored_and_written_over(tmp_path: Path) -> None:
    built = small()
    save(built, tmp_path, Progress(1, 100, loss=2.5), keep=2)
    torn = tmp_path / "checkpoints" / "step-2.partial"
    torn.mkdir()
    (torn / "rubbish").write_text("half a tensor")
    assert saved_steps(tmp_path) == [1]
    assert load_latest(small(), tmp_path) == (Progress(1, 100, loss=2.5), [])
    final = save(built, tmp_path, Progress(2, 200), keep=2)
    assert saved_steps(tmp_path) == [1, 2]
    assert not torn.exists()
    assert not (final / "rubbish").exists()
    assert read_manifest(final).progress["tokens"] == 200


@pytest.mark.parametrize(
    ("changes", "name", "shown"),
    [
        ({"spec": {"ffn": 40}}, "model.blocks.0.mlp.down.weight", ["(32, 48)", "(32, 40)"]),
        ({"spec": {"layers": 2}}, "model.blocks.1.attention.key.weight", ["absent", "(16, 32)"]),
        ({"spec": {"tied": True}}, "model.head.output.weight", ["(67, 32)", "absent"]),
        ({"optimizer": {"ema": 0.9}}, "optimizer.blocks.0.attention.key.weight.ema", ["absent"]),
        ({"optimizer": SGD}, "optimizer.blocks.0.attention.key.weight.exp_avg", ["absent"]),
        ({"training": {"precision": "fp32"}}, "model.blocks.0", ["torch.float64", "torch.float32"]),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_by_name(
    tmp_path: Path, changes: Any, name: str, shown: list[str]
) -> None:
    save(small(), tmp_path, Progress(1, 100), keep=2)
    other = small(**changes)
    before = [master.detach().clone() for master in other.weights.masters]
    with pytest.raises(BadInput) as caught:
        load_latest(other, tmp_path)
    problem = caught.value.problems[0]
    assert problem.key == "run.folder"
    assert f"'{name}" in problem.message
    assert all(text in problem.message for text in shown)
    assert all(torch.equal(a, b) for a, b in zip(before, other.weights.masters, strict=True))


@pytest.mark.parametrize(("states", "told"), [("bf16", "torch.bfloat16"), ("int8", "torch.uint8")])
def test_moments_of_another_kind_are_refused_by_their_key(states: str, told: str, tmp_path: Path) -> None:
    """In place of being cast without a word: then a run would not go on as it was."""
    built = small(training={"precision": "fp32"})
    saver = Saver(built, tmp_path, 1, background=False, job=dump_toml(built.job))
    saver.save(Progress(1, 100))
    saver.wait()
    with pytest.raises(BadInput) as caught:
        load_latest(small(training={"precision": "fp32"}, optimizer={"states": states}), tmp_path)
    problem = caught.value.problems[0]
    assert "exp_avg' is " in problem.message
    assert "torch.float32" in problem.message
    assert told in problem.message
    assert "It was trained with optimizer.states = 'fp32'." in problem.hint
