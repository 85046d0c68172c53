"""What is not this run's checkpoint is refused with the reason; nothing is executed, nothing overwritten."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.config import load
from fivefold.problems import BadInput
from fivefold.storage.manifest import COMMIT, FORMAT, MANIFEST, commit_text
from fivefold.training.build import Built, build
from fivefold.training.checkpoint import Progress, Saver, load_latest
from tests.cases import SPEC, Case

RUNNER = CliRunner()
SMALL = {
    "--model.dim": 16,
    "--model.layers": 1,
    "--model.heads": 2,
    "--model.ffn": 16,
    "--model.vocab_size": 64,
    "--model.max_seq_len": 16,
    "--training.steps": 2,
    "--training.global_batch": 2,
    "--training.seq_len": 8,
    "--data.source": "random",
    "--run.tensorboard": "false",
}


def train(folder: Path, **changes: Any) -> tuple[int, str]:
    given = SMALL | {f"--{key.replace('__', '.')}": value for key, value in changes.items()}
    words = [str(word) for pair in given.items() for word in pair]
    result = RUNNER.invoke(app, ["train", *words, "--run.folder", str(folder)])
    return result.exit_code, result.output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    code, text = train(folder)
    assert code == 0, text
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A run of two steps, its checkpoint that of step 2."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def rewritten(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and commit it, as another program might."""
    folder = run / "checkpoints" / "step-2"
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    text = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / COMMIT).write_bytes(commit_text(text))


# --- another model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model__vocab_size": 80}, "model.vocab_size: 80, but this run was started with 64"),
        ({"model__layers": 2}, "model.layers: 2, but this run was started with 1"),
    ],
)
def test_another_model_in_the_runs_folder(run: Path, changes: dict[str, Any], told: str) -> None:
    before = contents(run)
    code, text = train(run, **changes)
    assert code == 2
    assert told in text
    assert contents(run) == before


def test_another_models_checkpoint_is_told_in_a_few_lines(run: Path) -> None:
    """Its folder was brought here alone, and no job beside it."""
    for name in ("job.toml", "asked.toml"):
        (run / name).unlink()
    before = contents(run / "checkpoints")
    code, text = train(run, model__vocab_size=80, model__ffn=32)
    assert code == 2, text
    assert "'model.blocks.0.mlp.down.weight' is ((16, 16), torch.float32) there and ((16, 32)" in text
    assert "more tensors" in text
    assert "It was trained with model.ffn = 16, model.vocab_size = 64." in text
    assert len(text.splitlines()) < 10
    assert contents(run / "checkpoints") == before


def built(**changes: Any) -> Built:
    return build(Case("small", spec=SPEC | {"layers": 1} | changes).job(), torch.device("cpu"))


@pytest.mark.parametrize("job", ["", "model = 3", "[model]\nmodule = 'evil.py:Model'", "not [ toml", "\x00"])
def test_the_job_that_a_stranger_saved_with_it_is_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('exploded', 'w')")
    saver = Saver(built(), tmp_path, 1, background=False, job=job)
    saver.save(Progress(1, 100))
    saver.wait()
    with pytest.raises(BadInput, match="does not fit this job"):
        load_latest(built(ffn=40), tmp_path)
    assert not (tmp_path / "exploded").exists()


# --- not a checkpoint --------------------------------------------------------------------------------------


def newer(manifest: dict[str, Any]) -> None:
    manifest |= {"format": FORMAT + 1, "codec": "zstd", "versions": {"fivefold": "9.0"}}


def test_a_newer_format_is_refused_and_not_passed_over(run: Path) -> None:
    older = run / "checkpoints" / "step-1"
    shutil.copytree(run / "checkpoints" / "step-2", older)
    rewritten(run, newer)
    before = contents(run)
    code, text = train(run, training__steps=4)
    assert code == 2
    assert (
        f"fivefold 9.0 has written it in format {FORMAT + 1}, and this version reads format {FORMAT}" in text
    )
    assert contents(run) == before
    with pytest.raises(BadInput, match="in format"):
        load_latest(built(), run)
    for command in ("verify", "ls"):
        result = RUNNER.invoke(app, ["checkpoint", command, str(run)])
        assert f"in format {FORMAT + 1}" in result.output


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", [MANIFEST, COMMIT, "rank-00000.safetensors", ".metadata"])
def test_a_pickle_in_place_of_anything_is_not_opened(run: Path, name: str) -> None:
    folder, exploded = run / "checkpoints" / "step-2", run.parent / "exploded"
    bomb = pickle.dumps(Bomb(exploded))
    (folder / name).write_bytes(bomb)
    if name == MANIFEST:
        (folder / COMMIT).write_bytes(commit_text(bomb))
    code, text = train(run)
    if name == ".metadata":
        assert code == 0, text  # a file that no manifest lists is not looked at
    else:
        assert code == 2, text
        assert "step-2 is damaged" in text
    assert not exploded.exists()
    pickle.loads(bomb).close()
    assert exploded.exists()


def test_a_folder_of_torchs_own_format_is_not_a_checkpoint(run: Path) -> None:
    folder = run / "checkpoints" / "step-2"
    for path in folder.iterdir():
        path.unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(run.parent / "exploded")))
    (folder / "__0_0.distcp").write_bytes(b"weights")
    before = contents(run / "checkpoints")
    code, text = train(run)
    assert code == 2
    assert "manifest.json cannot be read: No such file or directory" in text
    assert not (run.parent / "exploded").exists()
    assert contents(run / "checkpoints") == before


def test_a_file_where_the_checkpoints_should_be(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("mine")
    code, text = train(run)
    assert code == 2
    assert f"run.folder: '{run}/checkpoints' cannot be read: Not a directory" in text
    assert (run / "checkpoints").read_text() == "mine"


# --- folders -----------------------------------------------------------------------------------------------


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "under"):
        code, text = train(folder)
        assert code == 2
        assert f"run.folder: '{folder}' cannot be made" in text
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file system of its own, so that it holds for every user."""
    options = ["-o", "ro", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("no permission to mount a file system")
    try:
        code, text = train(tmp_path)
        assert code == 2
        assert f"run.folder: '{tmp_path}' cannot be written: Read-only file system" in text
        code, text = train(tmp_path / "new")
        assert code == 2
        assert "cannot be made: Read-only file system" in text
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b", "..", ".", "", "a\\b", "a\x00b", "a\nb"])
def test_a_runs_name_is_not_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    with pytest.raises(BadInput, match=r"(?s)run\.name: .*a name is not a path") as caught:
        load(overrides=["--run.name", name])
    assert [problem.key for problem in caught.value.problems] == ["run.name"]
    assert list(tmp_path.rglob("*")) == [tmp_path / "deep"]
