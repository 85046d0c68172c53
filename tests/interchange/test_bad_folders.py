"""Folders that are not what they should be: refused with every problem named, and nothing in them runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.config import job_with
from fivefold.interchange.bring import bring_in
from fivefold.interchange.export import export
from fivefold.problems import BadInput
from fivefold.training.launch import train
from tests.interchange.zoo import configs, rewrite, saved, tensors

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen2", tmp_path_factory.mktemp("original"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "theirs"))


def problems(folder: Path, run: Path) -> list[str]:
    """What is said about a folder; and that nothing was written for it."""
    with pytest.raises(BadInput) as caught:
        bring_in(folder, run)
    assert not run.exists()
    return [f"{Path(problem.key).name}: {problem.message}" for problem in caught.value.problems]


def test_tensors_that_do_not_fit_are_all_named(folder: Path, tmp_path: Path) -> None:
    def change(held: dict[str, Any]) -> None:
        del held["model.layers.1.self_attn.k_proj.bias"]
        held["model.layers.0.mlp.extra.weight"] = ("F32", (2,), bytes(8))
        held["model.norm.weight"] = ("F32", (5,), bytes(20))
        held["lm_head.weight"] = ("I8", (300, 32), bytes(9600))

    rewrite(folder, change)
    assert problems(folder, tmp_path / "run") == [
        "theirs: 'model.layers.1.self_attn.k_proj.bias' is missing",
        f"{FILE}: 'lm_head.weight' has dtype I8; allowed: F64, F32, F16, BF16",
        f"{FILE}: 'model.norm.weight' has shape [5], but [32] in this model",
        f"{FILE}: 'model.layers.0.mlp.extra.weight' is in it, but not in this model",
    ]


def header(text: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "does not begin like a safetensors file"),
        (header(b"{}", 2**60), "does not begin like"),
        (header(b"{}", 99_999_999), "does not begin like"),
        (header(b"[" * 50_000), "cannot be used"),
        (header(b"[1]"), "header is not that of"),
        (header(b'{"x": 3}'), "header is not that of"),
        (header(b"\xff\xfe"), "cannot be used"),
        (header(b'{"x": {"dtype": "F8_E4M3", "shape": [0], "data_offsets": [0, 0]}}'), "F8_E4M3"),
        (header(b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}') + bytes(4), "no whole"),
        (
            header(b'{"x": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}') + bytes(4),
            "no whole",
        ),
        (
            header(b'{"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}') + bytes(4),
            "not all in it",
        ),
    ],
)
def test_files_that_are_no_safetensors_are_refused(
    content: bytes, said: str, folder: Path, tmp_path: Path
) -> None:
    (folder / FILE).write_bytes(content)
    (problem,) = problems(folder, tmp_path / "run")
    assert problem.startswith(f"{FILE}: cannot be used")
    assert said in problem


def test_a_truncated_file_is_refused(folder: Path, tmp_path: Path) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:-1])
    (problem,) = problems(folder, tmp_path / "run")
    assert "is not all in it" in problem


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 3000), byte=st.integers(0, 255), cut=st.none() | st.integers(0, 5000))
def test_a_changed_header_is_refused_or_harmless(
    place: int, byte: int, cut: int | None, original: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("changed")
    shutil.copy(original / "config.json", folder)
    content = bytearray((original / FILE).read_bytes())
    content[place] = byte
    (folder / FILE).write_bytes(content[:cut])
    try:
        bring_in(folder, folder / "run")
    except BadInput:
        assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"x": "../x.safetensors"}}, "'../x.safetensors', outside of the folder"),
        ({"weight_map": {"x": "/etc/passwd"}}, "'/etc/passwd', outside of the folder"),
        ({"weight_map": {"x": ".."}}, "'..', outside of the folder"),
        ({"weight_map": {"x": "absent.safetensors"}}, "cannot be read: No such file or directory"),
        ({"weight_map": {"x": "part.safetensors"}}, "does not hold 'x', which"),
        ({"weight_map": {"lm_head.weight": "part.safetensors"}}, "holds 'model.norm.weight', which"),
        ({"weight_map": {"x": 3}}, "not a table of file names"),
        ({"weight_map": []}, "not a table of file names"),
        ({}, "it has no weight_map"),
        ([], "it has no weight_map"),
        ("{", "is not an index of tensors"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(
    index: Any, said: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copy(folder / FILE, tmp_path / "x.safetensors")
    (folder / FILE).rename(folder / "part.safetensors")
    (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    assert said in "\n".join(problems(folder, tmp_path / "run"))


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickles_are_refused_and_not_opened(folder: Path, tmp_path: Path) -> None:
    (folder / FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    (problem,) = problems(folder, tmp_path / "run")
    assert "pickles only (pytorch_model.bin), and reading a pickle can run code" in problem
    assert not (tmp_path / "executed").exists()
    (folder / "pytorch_model.bin").unlink()
    assert problems(folder, tmp_path / "run") == [f"theirs: holds neither {FILE} nor {INDEX}"]


@contextmanager
def not_root() -> Iterator[None]:
    """Root is stopped by no permission."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("closed", ["", FILE, "config.json"])
def test_a_folder_without_permission_is_refused(closed: str, folder: Path) -> None:
    for parent in (folder, *folder.parents[:3]):  # those that pytest made
        parent.chmod(0o755)
    (folder / closed).chmod(0)
    with not_root(), pytest.raises(BadInput, match="Permission denied"):
        bring_in(folder, folder.parent / "run")
    (folder / closed).chmod(0o755)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["checkpoint", "import-hf", str(tmp_path / "x"), "--run", str(tmp_path)])
    assert result.exit_code == 2
    assert "no such file" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        job_with({"model.weights": str(folder), "model.preset": "tiny"})
    assert {"model.dim", "model.layers", "model.qkv_bias", "model.vocab_size"} <= {
        problem.key for problem in caught.value.problems
    }
    configs()["qwen2"].save_pretrained(tmp_path / "same")
    fields = {"model.weights": str(folder), "model.hf": str(tmp_path / "same"), "training.seq_len": 32}
    assert job_with(fields).spec.dim == 32
    with pytest.raises(BadInput) as caught:
        train(job_with(fields, {"model.layers": 3, "model.qkv_bias": False}), run=tmp_path / "run")
    told = str(caught.value)
    assert "'model.layers.3.self_attn.q_proj.weight' is in it, but not in this model" in told
    assert "'model.layers.0.self_attn.q_proj.bias' is in it, but not in this model" in told
    assert not (tmp_path / "run").exists()
    with pytest.raises(BadInput, match="given together with model"):
        job_with({"model.weights": str(folder), "model.module": "x.py:Model"})


def test_a_run_with_checkpoints_is_not_imported_over(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    bring_in(folder, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(BadInput, match="holds checkpoints already, the newest of step 0"):
        bring_in(folder, run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_an_output_that_contradicts_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    folder = saved("qwen3", tmp_path / "theirs")
    embedding = tensors(folder)["model.embed_tokens.weight"]
    rewrite(folder, lambda held: held.update({"lm_head.weight": embedding}))
    bring_in(folder, tmp_path / "run")
    rewrite(folder, lambda held: held.update({"lm_head.weight": (*embedding[:2], embedding[2][::-1])}))
    (problem,) = problems(folder, tmp_path / "other")
    assert "'lm_head.weight' is not the embedding" in problem


def test_older_gpt2_files_load(tmp_path: Path) -> None:
    """Without the prefix of today, and with tables of the attention's mask."""
    folder = saved("gpt2", tmp_path / "theirs")

    def change(held: dict[str, Any]) -> None:
        for name in list(held):
            held[name.removeprefix("transformer.")] = held.pop(name)
        held["h.0.attn.bias"] = ("BOOL", (1, 1, 2, 2), bytes(4))

    today = tensors(folder)
    rewrite(folder, change)
    found = bring_in(folder, tmp_path / "run")
    assert found.tensors == len(today)
    export(tmp_path / "run", tmp_path / "out")
    assert tensors(tmp_path / "out") == today


def test_what_a_config_asks_and_does_not_get_is_said(tmp_path: Path) -> None:
    folder = saved("gpt2-untied", tmp_path / "theirs")
    run = ["--run", str(tmp_path / "run")]
    result = CliRunner().invoke(app, ["checkpoint", "import-hf", str(folder), *run])
    assert result.exit_code == 0
    for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        assert f"{key} = 0.1, but models are trained without it here" in result.stderr
    assert "has no tokenizer.json: data.tokenizer is 'bytes'" in result.stderr
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0}
    config |= {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    config |= {"intermediate_size": 56, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["checkpoint", "import-hf", str(folder), "--run", str(tmp_path / "x")])
    assert result.exit_code == 2
    assert "'yarn' is not supported" in result.stderr
