"""A checkpoint arranged for another layout has the same numbers, in the pieces that its ranks keep.

That live ranks keep those pieces, and go on from them bit for bit: tests/training/test_any_layout.py.
"""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fivefold.axes.checks import check
from fivefold.cli import app
from fivefold.config import Job, load, resolve
from fivefold.storage.folder import folder_of, saved_steps, verified
from fivefold.storage.manifest import Manifest
from fivefold.storage.safetensors import WIDTHS
from fivefold.training.build import build
from fivefold.training.checkpoint import Progress
from fivefold.training.job_files import keep_jobs
from fivefold.training.reshard import arranged, reshard
from tests.cases import SPEC, Case, save

RUNNER = CliRunner()
MODEL = SPEC | {"vocab_size": 16, "dim": 8, "ffn": 12, "tied": True, "experts": 4, "experts_per_token": 2}
BIASED = {"balance": "bias"}
STEP = 3


def job_of(layout: dict[str, Any], ranks: int) -> Job:
    case = Case("", 1, {}, BIASED | {"micro_batch": 1}, {"ema": 0.9}, MODEL).job()
    given = case.layout.model_validate(layout)
    return resolve(case.model_copy(update={"layout": given}), ranks)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, saved after step 3 (and after step 2), whose every number is another one."""
    folder = tmp_path_factory.mktemp("run")
    job = Case("", 1, {}, BIASED, {"ema": 0.9}, MODEL).job()
    training = job.training.model_copy(update={"micro_batch": None})
    keep_jobs(folder, job.model_copy(update={"layout": type(job.layout)(), "training": training}), job)
    for step in (2, STEP):
        built = build(job, torch.device("cpu"))
        built.optimizer.state()
        with torch.no_grad():
            for index, tensor in enumerate([*built.weights.masters, *built.optimizer.tensors()]):
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * index)
        save(built, folder, Progress(step, 100 * step, loss=2.5))
    return folder


def numbers(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    """Every tensor of a checkpoint, put together element by element; elements in no piece are -1."""
    found, contents = {}, {file: (folder / file).read_bytes() for file in manifest.files}
    for name, tensor in manifest.tensors.items():
        kind = np.dtype(f"u{WIDTHS[tensor.dtype]}")
        whole = np.full(tensor.shape, -1 % 2 ** (8 * kind.itemsize), kind)
        for piece in tensor.pieces:
            part = np.frombuffer(contents[piece.file], kind, math.prod(piece.shape), piece.offset).reshape(
                piece.shape
            )
            whole[tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))] = part
        found[name] = whole.tobytes()
    return found


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A layout that this model can have, and its ranks."""
    names = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    degrees = draw(st.sampled_from([d for d in product((1, 2, 4), repeat=5) if math.prod(d) in (4, 8)]))
    layout: dict[str, Any] = dict(zip(names, degrees, strict=True))
    layout["zero"] = draw(st.sampled_from([1, 3])) if layout["dp_shard"] > 1 else 0
    layout["ep"] = draw(
        st.sampled_from([ep for ep in (1, 2, 4) if layout["dp_shard"] * layout["cp"] % ep == 0])
    )
    if layout["pp"] > 1:
        layout["schedule"] = draw(st.sampled_from(["1f1b", "interleaved"] + ["zbv"] * (layout["pp"] == 2)))
    return layout, math.prod(degrees)


@settings(max_examples=6, deadline=None)
@given(layouts())
def test_there_and_back_is_the_same(
    run: Path, tmp_path_factory: Any, drawn: tuple[dict[str, Any], int]
) -> None:
    layout, ranks = drawn
    job = job_of(layout, ranks)
    assume(not check(job))
    out = tmp_path_factory.mktemp("out")
    source = folder_of(run, STEP)
    written = reshard(source, verified(source), job, ranks, out / "there").manifest
    there = folder_of(out / "there", STEP)
    assert verified(there) == written
    assert numbers(there, written) == numbers(source, verified(source))
    assert set(written.files) <= {f"rank-{rank:05d}.safetensors" for rank in range(ranks)}
    back = reshard(there, written, job_of({}, 1), 1, out / "back").manifest
    assert numbers(folder_of(out / "back", STEP), back) == numbers(source, verified(source))
    assert back.progress == written.progress == verified(source).progress
    shutil.rmtree(out)


def test_each_rank_has_a_file_of_what_it_keeps(run: Path) -> None:
    job = job_of({"pp": 2, "dp_shard": 2, "zero": 3}, 4)
    cuts = arranged(job, verified(folder_of(run, STEP)).tensors)
    for block, files in (("blocks.0", {0, 1}), ("blocks.3", {2, 3})):
        of_it = [c for name, some in cuts.items() if f".{block}." in name for c in some]
        assert {int(cut.file[5:10]) for cut in of_it} == files
    assert any(name.startswith("buffers.blocks.3.") for name in cuts)
    router = cuts["optimizer.blocks.3.mlp.router.weight.exp_avg"]
    assert [(cut.start, cut.shape) for cut in router] == [((0, 0), (2, 8)), ((2, 0), (2, 8))]


def test_copies_are_spread_evenly_over_the_files(run: Path) -> None:
    source = folder_of(run, STEP)
    job = job_of({"dp_replicate": 4}, 4)
    sizes = [0] * 4
    tensors = verified(source).tensors
    for name, cuts in arranged(job, tensors).items():
        for cut in cuts:
            sizes[int(cut.file[5:10])] += math.prod(cut.shape) * WIDTHS[tensors[name].dtype]
    assert max(sizes) < 1.2 * min(sizes)


def test_it_needs_memory_for_a_tensor_not_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fivefold.storage.safetensors.CHUNK", 2**18)  # else a few of 16 MiB are in memory
    job = Case("", spec=SPEC | {"dim": 128, "ffn": 512, "layers": 6}).job()
    save(build(job, torch.device("cpu")), tmp_path / "run", Progress(1, 100))
    source = folder_of(tmp_path / "run", 1)
    manifest = verified(source)
    largest = max(math.prod(tensor.shape) * 8 for tensor in manifest.tensors.values())
    assert manifest.size > 50 * largest
    halved = resolve(job.model_copy(update={"layout": type(job.layout)(tp=2)}), 2)
    tracemalloc.start()
    try:
        reshard(source, manifest, halved, 2, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * largest


# --- the command -------------------------------------------------------------------------------------------


def call(*words: object) -> tuple[int, str]:
    result = RUNNER.invoke(app, ["checkpoint", "reshard", *map(str, words)])
    return result.exit_code, result.output


def test_a_run_is_resharded_by_the_command(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text = call(run, out, "--layout.tp", 2, "--nproc", 4)
    assert code == 0, text
    assert f"To go on: fivefold train {out}" in text
    assert saved_steps(out) == [STEP]
    asked = load(str(out))
    assert (asked.layout.tp, asked.layout.dp_shard) == (2, None)
    assert asked.run.folder == str(out)
    resolved = load(str(out / "job.toml"))
    assert (resolved.layout.tp, resolved.layout.dp_shard, resolved.layout.zero) == (2, 2, 3)
    assert RUNNER.invoke(app, ["checkpoint", "verify", str(out)]).output == f"step-{STEP}: whole\n"
    code, text = call(run, out, "--force", "--step", 2, "--json")
    assert code == 0, text
    assert json.loads(text)["ranks"] == 1
    assert saved_steps(out) == [2]


def test_the_newest_that_is_whole_is_taken(run: Path, tmp_path: Path) -> None:
    hurt = tmp_path / "hurt"
    shutil.copytree(run, hurt)
    (hurt / "checkpoints" / f"step-{STEP}" / "rank-00000.safetensors").write_bytes(b"short")
    code, text = call(hurt, tmp_path / "out", "--layout.pp", 2)
    assert code == 0, text
    assert saved_steps(tmp_path / "out") == [2]
    code, text = call(hurt, tmp_path / "other", "--layout.pp", 2, "--step", STEP)
    assert code == 2
    assert "is damaged: rank-00000.safetensors has 5 bytes" in text
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["RUN"], "1 folders are given, not two"),
        (["RUN", "RUN"], "is the run itself"),
        (["RUN", "FULL"], "is not empty"),
        (["RUN", "FILE"], "is a file"),
        (["FULL", "OUT"], "not that of a run"),
        (["GONE", "OUT"], "is not a folder"),
        (["RUN", "OUT", "--training.steps", "9"], "is not a key of the layout"),
        (["RUN", "OUT", "--layout.tp", "3"], "layout.tp: 3 ranks cannot share model.heads = 4"),
        (
            ["RUN", "OUT", "--layout.tp", "2", "--nproc", "3"],
            "layout.tp: tp 2 makes 2, but there are 3 ranks",
        ),
        (["RUN", "OUT", "--nproc", "0"], "--nproc: 0 is out of range"),
        (["RUN", "OUT", "--step", "77"], "has no checkpoint of step 77"),
        (["RUN", "OUT", "--layout.auto", "true"], "layout.auto: true: the planner would choose"),
        (["RUN", "FILE/under"], "cannot be made"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    run: Path, tmp_path: Path, words: list[str], told: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("a file")
    names = {"RUN": run, **{each.upper(): tmp_path / each for each in ("out", "full", "file", "gone")}}
    before = sorted(tmp_path.rglob("*"))
    code, text = call(*(names.get(word, word.replace("FILE/", f"{tmp_path}/file/")) for word in words))
    assert code == 2, text
    assert told in text
    assert sorted(tmp_path.rglob("*")) == before
