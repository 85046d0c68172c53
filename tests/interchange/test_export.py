"""Runs of our own as Hugging Face folders: what is written, what is refused, and in how much memory."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.config import Job, dump_toml, job_with, resolve
from fivefold.data.tokenizer import ByteTokenizer, open_tokenizer
from fivefold.interchange.config import config_of, same_model
from fivefold.interchange.export import export
from fivefold.interchange.start import write_start
from fivefold.interchange.tokenizer import keep_tokenizer
from fivefold.models.huggingface import described
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.problems import BadInput
from fivefold.storage import safetensors
from fivefold.storage.folder import folder_of
from fivefold.training.build import Built, build
from fivefold.training.checkpoint import Progress, Saver
from tests.cases import SPEC
from tests.interchange.zoo import opened, tensors
from tests.models.zoo import GEMMA

BYTES = {f"model.{key}": value for key, value in SPEC.items()} | {"model.vocab_size": 260}
LENGTH = {"training.seq_len": 32, "training.global_batch": 2}


def saved_run(run: Path, *settings: dict[str, Any]) -> torch.nn.Module:
    """A run with a checkpoint of step 3, of random weights; returns its model."""
    built = built_run(*settings)
    save(built, run, 3)
    return built.model


def built_run(*settings: dict[str, Any]) -> Built:
    return build(resolve(job_with(BYTES, LENGTH, *settings), 1), torch.device("cpu"))


def save(built: Built, run: Path, step: int) -> None:
    saver = Saver(built, run, keep=2, job=dump_toml(built.job))
    saver.save(Progress(step, 64 * step))
    saver.wait()


@torch.no_grad()
def test_a_run_of_our_own_is_a_model_with_its_tokenizer(tmp_path: Path) -> None:
    model = saved_run(tmp_path / "run")
    told = export(tmp_path / "run", tmp_path / "out")
    assert (told.step, told.family, told.dtypes, told.notes) == (3, "llama", ["F32"], [])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Straße, 日本語\n\tend  of it's"
    ids = tokenizer(text)["input_ids"]
    assert ids == ByteTokenizer().encode(text).tolist()
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == ByteTokenizer.end
    theirs = opened(tmp_path / "out")
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == ByteTokenizer.end
    tokens = torch.tensor([ids])
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_step_and_the_weights_that_are_asked_for_are_written(tmp_path: Path) -> None:
    """Of each step the weights have its number, and their average half a less."""
    built = built_run({"optimizer.ema": 0.9})
    for step in (3, 4):
        for master, average in zip(built.weights.masters, built.optimizer.ema or [], strict=True):
            master.fill_(step)
            average.fill_(step - 0.5)
        save(built, tmp_path / "run", step)
    asked = [(3, False, 3.0), (3, True, 2.5), (4, True, 3.5), (None, False, 4.0)]
    for number, (wanted, averaged, value) in enumerate(asked):
        out = tmp_path / f"out{number}"
        assert export(tmp_path / "run", out, wanted, averaged).step == (wanted or 4)
        held = bytearray(b"".join(data for *_, data in tensors(out).values()))
        assert torch.frombuffer(held, dtype=torch.float32).unique().tolist() == [value]


def test_a_tokenizer_goes_with_the_run_and_out_again_with_all_its_files(tmp_path: Path) -> None:
    saved_run(tmp_path / "first")
    export(tmp_path / "first", tmp_path / "given")
    (tmp_path / "given" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "given" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "mine": 1}')
    given = {"data.tokenizer": str(tmp_path / "given")}
    saved_run(tmp_path / "run", given)
    keep_tokenizer(given["data.tokenizer"], open_tokenizer(given["data.tokenizer"]), tmp_path / "run")
    told = export(tmp_path / "run", tmp_path / "out")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        assert name in told.files
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "given" / name).read_text()
    assert told.notes == []


def test_experts_that_are_chosen_by_more_than_the_weights_say_are_mentioned(tmp_path: Path) -> None:
    built = built_run({f"model.{key}": value for key, value in OTHERS["mixtral"].items()}, BIASED)
    save(built, tmp_path / "run", 3)
    for name, buffer in built.model.named_buffers():
        if name.endswith("bias_steps"):
            buffer[0] += 1
    save(built, tmp_path / "run", 4)
    assert export(tmp_path / "run", tmp_path / "out", step=3).notes == []
    (note,) = export(tmp_path / "run", tmp_path / "moved", step=4).notes
    assert "tokens may go to other experts than in training" in note


BIASED = {"training.balance": "bias"}


def test_a_config_that_still_describes_the_model_is_kept_without_the_code_it_names() -> None:
    spec = PRESETS["tiny"]
    kept = config_of(spec) | {"auto_map": {"AutoModel": "own.py--Model"}, "mine": 1, "bos_token_id": 7}
    assert config_of(spec, kept) == {key: value for key, value in kept.items() if key != "auto_map"}
    other = config_of(spec.model_copy(update={"norm_eps": 1e-3}), kept)
    assert (other["rms_norm_eps"], other["bos_token_id"]) == (1e-3, 7)
    assert not {"auto_map", "mine"} & other.keys()


OTHERS: dict[str, dict[str, Any]] = {
    "llama": {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {"qkv_bias": True, "sliding_window": 5, "tied": True},
    "qwen3": {"qk_norm": True, "head_dim": 10},
    "mixtral": {"experts": 4, "experts_per_token": 2},
    "gemma2": GEMMA,
    "gpt2": {
        **{"norm": "layernorm", "positions": "learned", "activation": "gelu-tanh", "kv_heads": 4},
        **{"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True},
    },
}


@pytest.mark.parametrize("family", OTHERS)
@torch.no_grad()
def test_the_family_is_the_one_that_computes_the_same(family: str, tmp_path: Path) -> None:
    model = saved_run(tmp_path / "run", {f"model.{key}": value for key, value in OTHERS[family].items()})
    assert export(tmp_path / "run", tmp_path / "out").family == family
    tokens = torch.randint(0, 260, (2, 20))
    logits = opened(tmp_path / "out")(tokens).logits
    torch.testing.assert_close(logits, model(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_config_that_describes_it(name: str) -> None:
    spec = PRESETS[name]
    if spec.parallel_block or spec.shared_experts or (spec.norm, spec.positions) in (("layernorm", "rope"),):
        with pytest.raises(BadInput, match="no family of transformers is a model with"):
            config_of(spec)
        return
    assert same_model(described(config_of(spec), Path("config.json")), spec)


# --- what is refused --------------------------------------------------------------------------------------


def refused(*words: object) -> str:
    result = CliRunner().invoke(app, ["checkpoint", "export-hf", *map(str, words)])
    assert result.exit_code == 2, result.output
    return result.stderr


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    saved_run(run)
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert "is not empty" in refused(run, out)
    assert list(out.iterdir()) == [out / "mine.txt"]
    assert "is a file" in refused(run, out / "mine.txt")
    assert "has no checkpoint of step 7" in refused(run, out, "--force", "--step", 7)
    assert "holds no averaged weights" in refused(run, out, "--force", "--ema")
    assert "'int4' is not known" in refused(run, out, "--force", "--dtype", "int4")
    assert "-1.0 is out of range" in refused(run, out, "--force", "--shard-gb", -1)
    assert "is not a folder" in refused(tmp_path / "absent", out, "--force")
    file = folder_of(run, 3) / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "step-3: is damaged: rank-00000.safetensors is not what was written" in refused(
        run, out, "--force"
    )
    assert list(out.iterdir()) == [out / "mine.txt"]


def test_a_model_that_no_family_has_is_refused_and_own_code_is_not_imported(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", {"model.parallel_block": True})
    assert "no family of transformers is a model with parallel_block = True" in refused(
        tmp_path / "run", tmp_path / "out"
    )
    code = tmp_path / "own.py"
    code.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    spec = ModelSpec.model_validate(SPEC)
    write_start(_Zeros(), spec, tmp_path / "own", {}, f'[model]\nmodule = "{code}:Model"\n')  # type: ignore[arg-type]
    assert "trained with a model of your own" in refused(tmp_path / "own", tmp_path / "out")
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "out").exists()


def test_force_replaces_the_model_and_leaves_the_rest(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    saved_run(run)
    export(run, out, shard_bytes=20_000)
    (out / "mine.txt").write_text("mine")
    stale = {path.name for path in out.glob("model*")}
    assert len(stale) > 3
    told = export(run, out, dtype="bf16", force=True)
    assert {path.name for path in out.iterdir()} == {*told.files, "mine.txt"}
    assert stale.isdisjoint(told.files)
    assert {dtype for dtype, _, _ in tensors(out).values()} == {"BF16"}
    assert opened(out).dtype == torch.bfloat16


def test_a_gigabyte_of_a_shard_is_a_thousand_millions_of_bytes(tmp_path: Path) -> None:
    run, most = tmp_path / "run", 12_000
    saved_run(run)
    words = ["export-hf", str(run), str(tmp_path / "typed"), "--shard-gb", str(most / 10**9), "--json"]
    told = json.loads(CliRunner().invoke(app, ["checkpoint", *words]).stdout)
    assert told["files"] == export(run, tmp_path / "bytes", shard_bytes=most).files
    assert told["files"] != export(run, tmp_path / "more", shard_bytes=int(most * 2**30 / 10**9)).files


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    saved_run(run)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # files grow no larger, as on a full disk
    try:
        said = refused(run, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be written: File too large" in said
    assert not out.exists()
    old = export(run, out)
    before = tensors(out)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        refused(run, out, "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tensors(out) == before
    assert {path.name for path in out.iterdir()} == set(old.files)


# --- memory -----------------------------------------------------------------------------------------------


class _Zeros:
    """Weights that come from nowhere."""

    def dtype(self, ours: str) -> torch.dtype:
        return torch.float32

    def fill(self, ours: str, target: torch.Tensor, offset: Sequence[int]) -> None:
        target.zero_()


@contextmanager
def watched() -> Iterator[list[int]]:
    """Bytes of memory that are no file's, by which the process grew at most."""

    def now() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    before, grown, done = now(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            grown[0] = max(grown[0], now() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield grown
    finally:
        done.set()
        watcher.join()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux counts memory there")
def test_memory_is_that_of_a_few_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 160 MB goes in and out; its largest tensor has 2.1 MB."""
    monkeypatch.setattr(safetensors, "CHUNK", 2**18)
    sizes = {"vocab_size": 260, "dim": 512, "layers": 15, "heads": 8, "ffn": 1024, "max_seq_len": 64}
    spec = ModelSpec.model_validate(sizes)
    job = Job.model_validate({"model": sizes, "training": {"precision": "fp32"}})
    largest, run = 4 * 512 * 1024, tmp_path / "run"
    with watched() as coming:
        write_start(_Zeros(), spec, run, {}, dump_toml(job))  # type: ignore[arg-type]
    with watched() as going:
        told = export(run, tmp_path / "out", dtype="fp32")
    assert told.bytes > 70 * largest
    assert 0 < going[0] < 20 * largest  # what the interpreter keeps of freed memory is among it
    assert coming[0] < 30 * largest  # threads and what is imported are among it
