"""Before launch: what surely does not fit is refused with what would help, and what may not is told."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.comm.world import single_world
from fivefold.config import Job, job_with, load, resolve
from fivefold.hardware.cluster import find_cluster
from fivefold.ledger.offload import BUFFERS
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameter_count
from fivefold.models.own.spec import OwnSpec
from fivefold.planner.goal import goal_of
from fivefold.planner.memory.fullest_rank import GIB, RISK, memory_on
from fivefold.storage.folder import folder_of
from fivefold.storage.manifest import read_manifest
from fivefold.storage.safetensors import WIDTHS
from fivefold.training import preflight, remedies
from fivefold.training.disk_space import checkpoint_bytes, disk_warning
from fivefold.training.launch import prepare
from fivefold.training.preflight import (
    Fit,
    fit_on_gpu,
    fit_on_host,
    host_problems,
    memory_problems,
    memory_warning,
)
from fivefold.training.run import TrainingRun

OWN = "tests/models/own_models.py:Plain"


def small(ranks: int = 1, **settings: Any) -> Job:
    """A job of the preset `tiny`."""
    given = {"model.preset": "tiny", "data.source": "random", "run.tensorboard": False} | settings
    return resolve(job_with(given), ranks)


def large(*words: str) -> Job:
    return load(None, "llama3-405b", ["--data.source=random", *words])


# --- memory ----------------------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_at_once_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(app, ["train", "--preset", "llama3-405b"])
    assert run.exit_code == 2
    first, hint = run.output.splitlines()
    assert first.startswith("memory: llama3-405b needs 6,048 GiB of memory on this machine, and ")
    assert hint.startswith("    No layout of 1 rank fits: the leanest needs 6,048.2 GiB a rank. About ")
    assert hint.endswith("To try all the same: --force.")
    assert list(tmp_path.iterdir()) == []


def test_force_starts_it_and_the_disk_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = prepare(large(), 1, "cpu", tmp_path / "run", force=True)
    assert start.force
    told = capsys.readouterr().err
    assert "memory: llama3-405b needs 6,048 GiB" in told
    assert "it may run out (chance 100%, by the planner's figure)" in told
    assert "disk: checkpoint.keep = 2 needs 13,607 GiB (3 checkpoints of 4,536 GiB" in told


def test_ranks_of_one_machine_share_its_memory_and_those_of_a_pipeline_differ() -> None:
    two = small(2, **{"layout.zero": 3})
    each = float(memory_on(Setup.of(two), "cpu").device)
    assert fit_on_host(two, GIB, 2).needed == pytest.approx(2 * each)
    assert fit_on_host(two, GIB, 1).needed == pytest.approx(each)  # the other one is elsewhere
    piped = small(2, **{"layout.pp": 2, "model.layers": 5, "training.global_batch": 8})
    fullest = float(memory_on(Setup.of(piped), "cpu").device)
    assert fullest < fit_on_host(piped, GIB, 2).needed < 2 * fullest


def test_it_is_refused_only_where_it_is_sure_and_told_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(part: float) -> bool:
        return Fit(10 * GIB, 10 * GIB * part, 1, "").chance >= preflight.SURE

    def told(part: float) -> bool:
        return Fit(10 * GIB, 10 * GIB * part, 1, "").chance > RISK

    assert [(refused(part), told(part)) for part in (0.8, 0.9, 1.0, 1.05, 1.1)] == [
        (True, True),
        (False, True),
        (False, True),
        (False, True),
        (False, False),
    ]
    assert Fit(GIB, 0, 1, "").chance == 1
    job = small()
    needed = fit_on_host(job, GIB, 1).needed
    for part, problems, warned in ((0.8, 1, True), (1.0, 0, True), (1.1, 0, False)):
        monkeypatch.setattr(preflight, "available_memory", lambda part=part: needed * part)
        assert len(memory_problems(job, "cpu")) == problems
        assert (memory_warning(job, "cpu") is not None) == warned


def refusal(job: Job, there: float, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(preflight, "available_memory", lambda: there)
    (problem,) = memory_problems(job, "cpu")
    return str(problem)


def test_a_layout_that_fits_is_named_and_does(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small(2, **{"layout.zero": 0})
    there = 0.4 * GIB
    text = refusal(job, there, monkeypatch)
    assert "needs 0.63 GiB of memory on this machine for its 2 ranks, and 0.40 GiB are there" in text
    named = text.partition("This fits: ")[2].partition(" (")[0]
    changes = dict(change.split(" = ") for change in named.split(", "))
    assert changes
    given = {key: value.strip("'") for key, value in changes.items()}
    words = [f"--{key}={value}" for key, value in given.items()]
    fitting = resolve(load(None, "tiny", ["--layout.zero=0", "--data.source=random", *words]), 2)
    assert fit_on_host(fitting, there, 2).chance <= RISK
    assert memory_problems(fitting, "cpu") == []
    assert memory_warning(fitting, "cpu") is None


def test_a_loss_in_chunks_is_named_where_no_layout_has_room_for_the_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["--model.vocab_size=50000", "--training.seq_len=4096", "--model.max_seq_len=4096"]
    words += ["--training.global_batch=1", "--data.source=random"]
    text = refusal(resolve(load(None, "tiny", words), 1), 2 * GIB, monkeypatch)
    named = text.partition("This fits: ")[2].partition(" (")[0].split(", ")
    assert "training.loss_chunk = 1024" in named
    words += [f"--{change.replace(' = ', '=')}" for change in named]
    fitting = resolve(load(None, "tiny", [word.replace("'", "") for word in words]), 1)
    assert fit_on_host(fitting, 2 * GIB, 1).chance <= RISK


def test_states_in_fewer_bits_are_named_where_nothing_else_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model.dim=512", "--model.ffn=2048", "--model.vocab_size=2048", "--training.seq_len=64"]
    words += ["--training.global_batch=1", "--data.source=random"]
    plain, narrow = (
        resolve(load(None, "tiny", [*words, f"--optimizer.states={states}"]), 1)
        for states in ("fp32", "int8")
    )
    there = 1.15 * fit_on_host(narrow, GIB, 1).needed
    assert "This fits: optimizer.states = 'int8' (" in refusal(plain, there, monkeypatch)
    assert fit_on_host(narrow, there, 1).chance <= RISK


def test_of_a_model_of_ones_own_weights_gradients_and_states_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"model.module": OWN, "data.source": "random", "data.separate_documents": False}
    settings |= {"training.seq_len": 16, "training.global_batch": 4, "run.tensorboard": False}
    job = resolve(job_with(settings | {"layout.zero": 0}), 2)
    assert isinstance(job.spec, OwnSpec)
    elements = sum(math.prod(shape) for _, shape in job.spec.tensors)
    fit = fit_on_host(job, GIB, 2)
    # Weights, gradients, two moments of float32; and a counter a tensor.
    assert fit.needed == 2 * (16 * elements + 4 * len(job.spec.tensors))
    text = refusal(job, fit.needed / 2, monkeypatch)
    assert "Plain needs at least 0.00 GiB" in text
    assert "What helps: more ranks under layout.zero = 3, a smaller training.micro_batch" in text
    assert fit_on_gpu(job, GIB, "").needed == fit.needed / 2


def test_a_gpu_has_to_hold_its_fullest_rank() -> None:
    job = resolve(large("--training.seq_len=4096", "--training.global_batch=8", "--layout.zero=3"), 8, "cuda")
    fit = fit_on_gpu(job, 79.1 * GIB, "on each GPU")
    assert fit.chance == 1
    assert str(fit).startswith("needs ")
    assert str(fit).endswith(" GiB on each GPU, and 79.1 GiB are there")
    assert fit_on_gpu(job, 5000 * GIB, "").chance == 0


# --- the disk --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer.ema": 0.9, "training.precision": "bf16"},
        {"optimizer.name": "sgd", "model.tied": True},
        {"training.precision": "fp64", "model.experts": 2, "model.experts_per_token": 1},
    ],
)
def test_the_size_of_a_checkpoint_is_known_before(tmp_path: Path, settings: dict[str, Any]) -> None:
    shape = {"model.dim": 32, "model.layers": 2, "model.heads": 4, "model.kv_heads": 2, "model.ffn": 32}
    steps = {"training.steps": 1, "training.seq_len": 16, "training.global_batch": 2}
    job = small(1, **shape, **steps, **settings)
    with TrainingRun(job, single_world("cpu"), tmp_path) as run:
        run.advance()
    tensors = read_manifest(folder_of(tmp_path, 1)).tensors
    saved = {name: math.prod(t.shape) * WIDTHS[t.dtype] for name, t in tensors.items()}
    state = sum(size for name, size in saved.items() if not name.startswith("buffers."))
    assert checkpoint_bytes(job) == state


def test_checkpoints_that_the_disk_has_no_room_for_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small(1, **{"training.steps": 100, "checkpoint.keep_every": 20})
    assert disk_warning(job, tmp_path) is None
    size = checkpoint_bytes(job)
    free = type("usage", (), {"free": 8 * size - 1})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    told = disk_warning(job, tmp_path)
    assert told is not None
    assert told.startswith(
        "disk: checkpoint.keep = 2 and checkpoint.keep_every = 20 needs 0.11 GiB (8 checkpoints"
    )
    assert disk_warning(small(1, **{"training.steps": 100, "checkpoint.keep": 0}), tmp_path) is None
    assert disk_warning(small(1, **{"training.steps": 7, "checkpoint.keep": 50}), tmp_path) is None


# --- states in host memory -------------------------------------------------------------------------------


def hosted(ranks: int = 1, *words: str, offload: bool = True) -> Job:
    """llama3-8b on GPUs, with states in their host's memory."""
    given = [f"--optimizer.offload={offload}".lower(), "--data.source=random", *words]
    return resolve(load(None, "llama3-8b", given), ranks, "cuda")


def test_host_memory_that_is_too_small_for_offloaded_states_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters and moments, 12 bytes a weight; and as much to write checkpoints from."""
    states = 12 * parameter_count(hosted().spec)
    monkeypatch.setattr(preflight, "available_memory", lambda: 100 * GIB)
    (problem,) = host_problems(hosted(), "cuda")
    assert problem.key == "optimizer.offload"
    assert problem.message == (
        f"true needs {2 * states / GIB:,.0f} GiB of this machine's own memory for its rank, half of it for "
        "the copy of which checkpoints are written, and 100 GiB are there"
    )
    less = f"optimizer.states = 'bf16' ({2 * states * 2 / 3 / GIB:,.0f} GiB)"
    assert f"checkpoint.async = false ({states / GIB:.1f} GiB), {less}, more memory" in problem.hint
    for words in ("--checkpoint.async=false", "--checkpoint.keep=0"):
        assert host_problems(hosted(1, words), "cuda") == []
    two = hosted(2, "--layout.zero=0", "--checkpoint.keep=0")
    (problem,) = host_problems(two, "cuda")
    assert (
        f"needs {2 * states / GIB:,.0f} GiB of this machine's own memory for its 2 ranks" in problem.message
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert host_problems(two, "cuda") == [], "the other rank is elsewhere"


def test_where_the_host_computes_its_memory_is_counted_once() -> None:
    """All of it, and no less than without."""
    plain, offload = (small(1, **{"optimizer.offload": each}) for each in (False, True))
    assert host_problems(offload, "cpu") == []
    needed = [fit_on_host(job, GIB, 1).needed for job in (plain, offload)]
    assert needed[0] <= needed[1] <= needed[0] + BUFFERS * 8 * parameter_count(plain.spec)


def test_it_is_proposed_where_nothing_else_fits_one_gpu_and_the_host_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goal, cluster = goal_of(hosted(offload=False), 1, "cuda"), find_cluster("dgx-h100")
    found = []
    for there in (80 * GIB, 120 * GIB):
        monkeypatch.setattr(remedies, "available_memory", lambda there=there: there)
        found.append(remedies._with_less(goal, cluster, "cuda"))
    nothing, best = found
    assert nothing is None
    assert best is not None
    assert best.setup.offload
    assert best.memory_gib < 80
    assert "optimizer.offload = true" in remedies._changes(hosted(offload=False), best.setup)
