"""Open numbers filled in, and what does not go together refused, with numbers that do."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes import data as data_axis
from fivefold.axes.checks import check
from fivefold.config import Job, dump_toml, load, resolve
from fivefold.models.presets import PRESETS
from fivefold.problems import BadInput, Problem


def unresolvable(ranks: int, *overrides: str, preset: str | None = None) -> dict[str, Problem]:
    """What `resolve` finds wrong, by key."""
    with pytest.raises(BadInput) as caught:
        resolve(load(None, preset, list(overrides)), ranks)
    return {problem.key: problem for problem in caught.value.problems}


def resolved(ranks: int, *overrides: str, preset: str | None = None) -> Job:
    return resolve(load(None, preset, list(overrides)), ranks)


def layout(ranks: int, *overrides: str) -> tuple[int | None, int | None, int | None]:
    """The (dp_replicate, dp_shard, zero) that a job resolves to."""
    filled = resolve(load(None, None, ["--training.global_batch=24", *overrides]), ranks).layout
    return filled.dp_replicate, filled.dp_shard, filled.zero


@pytest.mark.parametrize(
    ("ranks", "words", "expected"),
    [
        (1, "", (1, 1, 0)),
        (4, "", (1, 4, 3)),
        (4, "--layout.zero 1", (1, 4, 1)),
        (4, "--layout.zero 0", (4, 1, 0)),
        (8, "--layout.zero 0 --layout.tp 2 --layout.pp 2", (2, 1, 0)),
        (8, "--layout.tp 2", (1, 4, 3)),
        (4, "--layout.dp_replicate 2", (2, 2, 3)),
        (4, "--layout.dp_replicate 4", (4, 1, 0)),
        (4, "--layout.dp_replicate 2 --layout.dp_shard 2 --layout.zero 2", (2, 2, 2)),
        (4, "--layout.dp_shard 1", (4, 1, 0)),
        (4, "--layout.dp_shard 1 --layout.zero 3", (4, 1, 0)),
        (1, "--layout.zero 3", (1, 1, 0)),
    ],
)
def test_the_data_degree_left_out_fills_up(ranks, words, expected):
    assert layout(ranks, *words.split()) == expected


@pytest.mark.parametrize(
    ("ranks", "words", "key", "fixes"),
    [
        (4, "--layout.dp_shard 2", "layout.dp_shard", ["dp_shard = 4", "dp_replicate = 2", "--nproc 2"]),
        (4, "--layout.dp_replicate 3", "layout.dp_replicate", ["dp_replicate = 4", "--nproc 3"]),
        (4, "--layout.zero 0 --layout.dp_shard 2", "layout.dp_shard", ["layout.dp_replicate = 2"]),
        (4, "--layout.zero 0 --layout.dp_replicate 2", "layout.dp_replicate", ["dp_replicate = 4"]),
        (3, "", "training.global_batch", ["30 or 33"]),
        (4, "--training.micro_batch 3", "training.global_batch", ["24 or 36", "micro_batch = 2 or 4"]),
        (4, "--training.micro_batch 9", "training.global_batch", ["global_batch = 36", "micro_batch = 8"]),
        (8, "--training.global_batch 4", "training.global_batch", ["global_batch = 8"]),
        (1, "--training.seq_len 1025", "training.seq_len", ["at most 1024", "model.max_seq_len"]),
    ],
)
def test_a_number_that_does_not_fit_comes_with_one_that_does(ranks, words, key, fixes):
    found = unresolvable(ranks, *words.split())
    assert found.keys() == {key}
    assert all(fix in found[key].hint for fix in fixes)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64), st.integers(1, 48), st.integers(1, 12) | st.none())
def test_the_batches_that_are_suggested_are_accepted(batch, ranks, micro):
    given_micro = [] if micro is None else [f"--training.micro_batch={micro}"]
    try:
        job = resolve(load(None, None, [f"--training.global_batch={batch}", *given_micro]), ranks)
        assert job.training.micro_batch is not None
        assert batch % (job.training.micro_batch * ranks) == 0
    except BadInput as error:
        (problem,) = error.problems
        for change in problem.hint.removeprefix("Use ").removesuffix(".").split(", or "):
            key, values = change.split(" = ")
            for value in values.split(" or "):
                words = [f"--training.global_batch={batch}", *given_micro, f"--{key}={value}"]
                resolve(load(None, None, words), ranks)


def test_precision_follows_the_device_unless_given():
    assert resolve(load(), 1, "cuda").training.precision == "bf16"
    assert resolve(load(), 1, "cpu").training.precision == "fp32"
    assert resolve(load(None, None, ["--training.precision", "fp64"]), 1, "cuda").training.precision == "fp64"


@pytest.mark.parametrize(
    ("ranks", "words", "says"),
    [
        (2, ["--layout.tp=2"], "no other rank sums the same gradients"),
        (1, [], "no other rank sums the same gradients"),
    ],
)
def test_only_what_ranks_sum_is_compressed(ranks, words, says):
    job = resolve(load(None, "tiny", ["--communication.compress=int8", *words]), ranks)
    (problem,) = check(job, [data_axis])
    assert problem.key == "communication.compress"
    assert says in problem.message


def test_only_replicas_have_sums_between_them():
    words = ["--communication.compress=int8", "--communication.compress_on=replicate"]
    (problem,) = check(resolve(load(None, "tiny", [*words, "--layout.zero=3"]), 2), [data_axis])
    assert (problem.key, problem.message) == (
        "communication.compress_on",
        "'replicate', but layout.dp_replicate is 1",
    )
    assert "dp_replicate above 1" in problem.hint


@pytest.mark.parametrize("word", ["compress_on=replicate", "error_feedback=false"])
def test_what_is_said_of_compression_is_refused_without_any(word):
    words = ["--layout.zero=0", "--layout.dp_replicate=2", f"--communication.{word}"]
    (problem,) = check(resolve(load(None, "tiny", words), 2), [data_axis])
    assert problem.key == f"communication.{word.partition('=')[0]}"
    assert "but nothing is compressed" in problem.message
    assert check(resolve(load(None, "tiny", [*words, "--communication.compress=bf16"]), 2), [data_axis]) == []


@pytest.mark.parametrize(
    ("word", "lacking"),
    [
        ("layout.schedule=1f1b", "layout.pp"),
        ("layout.virtual_stages=2", "layout.pp"),
        ("layout.cp_kind=ring", "layout.cp"),
        ("layout.ep=2", "experts"),
        ("training.balance=bias", "experts"),
        ("training.routing=balanced", "experts"),
        ("training.balance_weight=0.1", "training.balance"),
        ("training.balance_rate=0.1", "training.balance"),
        ("communication.tp_overlap=true", "layout.tp"),
        ("optimizer.momentum=0.9", "optimizer.name = 'adamw'"),
    ],
)
def test_a_setting_of_something_that_is_not_there_is_refused(word, lacking):
    key = word.partition("=")[0]
    assert lacking in unresolvable(2, f"--{word}")[key].message


@pytest.mark.parametrize(("name", "momentum"), [("adamw", None), ("sgd", 0.9), ("muon", 0.95)])
def test_momentum_is_that_of_the_optimizer_unless_given(name, momentum):
    found = resolved(1, f"--optimizer.name={name}")
    assert found.optimizer.momentum == momentum
    assert resolve(found, 1) == found
    if momentum:
        assert resolved(1, f"--optimizer.name={name}", "--optimizer.momentum=0").optimizer.momentum == 0


def test_the_longest_sequence_is_taken():
    assert resolved(1, "--training.seq_len=1024").training.seq_len == 1024


def test_rollback_needs_checkpoints_to_go_back_to():
    rollback = "--resilience.non_finite=rollback"
    hint = unresolvable(1, rollback, "--checkpoint.keep=0")["resilience.non_finite"].hint
    assert "checkpoint.keep" in hint
    assert resolved(1, rollback).resilience.non_finite == "rollback"


def test_the_settings_of_an_axis_get_defaults_with_it():
    layout = resolved(2, "--layout.pp=2").layout
    assert (layout.schedule, layout.virtual_stages, layout.cp_kind) == ("1f1b", 1, None)
    layout = resolved(2, "--layout.pp=2", "--layout.schedule=zbv").layout
    assert (layout.schedule, layout.virtual_stages) == ("zbv", 2)
    micro = [
        resolved(2, "--layout.pp=2", f"--training.global_batch={n}").training.micro_batch for n in (32, 12, 7)
    ]
    assert micro == [4, 1, 1]
    layout = resolved(2, "--layout.cp=2").layout
    assert (layout.cp_kind, layout.schedule, layout.zero) == ("ring", None, 0)
    assert resolved(2, "--layout.cp=2", "--layout.zero=3").layout.zero == 3
    training = resolved(1, preset="mixtral-8x7b").training
    assert (training.balance, training.balance_weight, training.routing) == ("loss", 0.01, "learned")
    off = resolved(1, "--training.balance_weight=0.0", preset="mixtral-8x7b").training
    assert (off.balance, off.balance_weight) == ("loss", 0.0)
    assert resolved(1).training.balance is None


CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def test_a_resolved_job_no_longer_needs_the_hugging_face_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    job = load(None, None, ["--model.hf", str(path), "--model.layers", "3"])
    spec = job.spec
    resolved = resolve(job, 1)
    path.unlink()
    assert resolved.model.hf is None
    assert resolved.spec == spec
    assert spec.layers == 3
    (tmp_path / "job.toml").write_text(dump_toml(resolved))
    assert load(str(tmp_path / "job.toml")).spec == spec


def test_weights_bring_their_tokenizer_unless_one_is_given_and_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps(CONFIG))
    assert resolved(1, "--model.weights=theirs").data.tokenizer == "bytes"  # it has none
    (theirs / "tokenizer.json").write_text("{}")
    job = resolved(1, "--model.weights=theirs")
    assert (job.data.tokenizer, job.model.weights) == (str(theirs), str(theirs))
    assert resolved(1, "--model.weights=theirs", "--data.tokenizer=bytes").data.tokenizer == "bytes"


def test_a_model_is_made_once_and_a_copy_with_another_has_its_own():
    job = load(None, "tiny")
    assert job.spec is job.spec
    other = Job.model_validate({"model": {"preset": "gpt2"}}).model
    assert job.model_copy(update={"model": other}).spec == PRESETS["gpt2"]
    assert job.model_copy(update={"run": job.run}).spec is job.spec
    assert job.model.model_copy(update={"preset": "gpt2"}).spec == PRESETS["gpt2"]
    assert pickle.loads(pickle.dumps(job)).spec == job.spec
    assert job == load(None, "tiny") == Job.model_validate(job.model_dump(by_alias=True))


@pytest.mark.parametrize("states", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("words", "told", "helps"),
    [
        ("--optimizer.name sgd", "optimizer.name = 'sgd'", "'adamw' or 'muon'"),
        ("--training.precision fp64", "training.precision = 'fp64'", "bf16, fp16 or fp32"),
        (
            "--optimizer.name muon --training.precision fp64",
            "training.precision = 'fp64'",
            "bf16, fp16 or fp32",
        ),
    ],
)
def test_states_in_fewer_bits_are_adamws_and_muons_beside_weights_in_32(states, words, told, helps):
    found = unresolvable(1, "--optimizer.states", states, *words.split())
    assert found.keys() == {"optimizer.states"}
    assert found["optimizer.states"].message == f"'{states}' under {told}"
    assert helps in found["optimizer.states"].hint
    for precision in ("bf16", "fp16", "fp32"):
        for name in ("adamw", "muon"):
            words = [
                "--optimizer.states",
                states,
                "--optimizer.name",
                name,
                "--training.precision",
                precision,
            ]
            resolved(1, *words)


@pytest.mark.parametrize(
    ("words", "told", "helps"),
    [
        ("--optimizer.name muon", "true with optimizer.name = 'muon', whose updates need", "= 'adamw'"),
        (
            "--communication.local_steps 2 --layout.dp_replicate 2 --layout.zero 0",
            "true with outer steps, whose weights and momentum would stay on the device",
            "communication.local_steps = 1",
        ),
    ],
)
def test_what_cannot_lie_in_host_memory_is_refused(words: str, told: str, helps: str) -> None:
    ranks = 2 if "local_steps" in words else 1
    found = unresolvable(ranks, "--optimizer.offload", "true", *words.split())
    assert found.keys() == {"optimizer.offload"}
    assert told in found["optimizer.offload"].message
    assert helps in found["optimizer.offload"].hint
