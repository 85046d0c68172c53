"""A folder of `transformers`, taken in and written out again: the same logits, every tensor bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.config import Job, resolve
from fivefold.interchange.bring import bring_in
from fivefold.interchange.export import export
from fivefold.storage.safetensors import read_header
from fivefold.storage.tensors import as_bytes
from fivefold.training.build import build
from tests.interchange.zoo import FAMILIES, opened, rewrite, saved, tensors

TOKENS = torch.arange(80).view(2, 40) * 7 % 300


def ours_from(folder: Path) -> torch.nn.Module:
    """Our decoder, started by a job with `model.weights`."""
    job = Job.model_validate({"model": {"weights": str(folder)}, "training": {"seq_len": 32}})
    return build(resolve(job, 1), torch.device("cpu")).model


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_every_tensor_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "theirs")
    found = bring_in(theirs, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    assert tensors(tmp_path / "out") == tensors(theirs)
    assert found.tensors == len(tensors(theirs))
    before, after = opened(theirs), opened(tmp_path / "out")
    expected = before(TOKENS).logits
    assert expected.std() > 0.1
    assert torch.equal(after(TOKENS).logits, expected)
    torch.testing.assert_close(ours_from(theirs)(TOKENS), expected, rtol=0, atol=1e-5)
    old, new = (json.loads((each / "config.json").read_text()) for each in (theirs, tmp_path / "out"))
    assert new == old
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == json.loads((theirs / "generation_config.json").read_text())


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_shards_and_narrow_dtypes_come_back(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "theirs", torch.bfloat16, max_shard_size="60KB")
    assert len(list(theirs.glob("*.safetensors"))) > 2
    bring_in(theirs, tmp_path / "run")
    told = export(tmp_path / "run", tmp_path / "out", shard_bytes=50_000)
    assert tensors(tmp_path / "out") == tensors(theirs)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2
    for held in map(read_header, shards):  # a tensor that is larger has a file to itself
        assert len(held) == 1 or sum(stored.bytes for stored in held.values()) <= 50_000
    assert {path.name for path in shards} <= set(told.files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(data) for *_, data in tensors(theirs).values())
    opened(tmp_path / "out")
    wide = export(tmp_path / "run", tmp_path / "wide", dtype="fp32")
    assert wide.dtypes == ["F32"]
    assert opened(tmp_path / "wide").dtype == torch.float32


def test_experts_in_different_dtypes_come_back(tmp_path: Path) -> None:
    """We keep them as one tensor, which must hold the widest of them."""
    theirs = saved("mixtral", tmp_path / "theirs")

    def narrowed(held: dict[str, Any]) -> None:
        for name in [name for name in held if "experts.3.w1" in name]:
            wide = torch.frombuffer(bytearray(held[name][2]), dtype=torch.float32)
            held[name] = ("BF16", held[name][1], as_bytes(wide.bfloat16()))

    rewrite(theirs, narrowed)
    assert {kind for kind, *_ in tensors(theirs).values()} == {"F32", "BF16"}
    bring_in(theirs, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    assert tensors(tmp_path / "out") == tensors(theirs)


def test_the_command_line(tmp_path: Path) -> None:
    theirs, run, out = saved("qwen3", tmp_path / "theirs"), tmp_path / "run", tmp_path / "out"
    result = CliRunner().invoke(app, ["checkpoint", "import-hf", str(theirs), "--run", str(run)])
    assert result.exit_code == 0, result.output
    assert "qwen3: " in result.stdout
    assert f"fivefold train {run}" in result.stdout
    result = CliRunner().invoke(app, ["checkpoint", "export-hf", str(run), str(out), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["step"] == 0
    assert told["files"][-1] == "config.json"
    assert tensors(out) == tensors(theirs)
    assert {path.name for path in out.iterdir()} == set(told["files"])
