"""Jobs: read, refused, resolved, written, read again."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes import data as data_axis
from fivefold.axes.checks import check
from fivefold.config import DataSource, Job, dump_toml, list_keys, load, resolve
from fivefold.models.presets import PRESETS
from fivefold.problems import BadInput, Problem


def problems(*overrides: str, path: str | None = None, preset: str | None = None) -> dict[str, Problem]:
    """What `load` finds wrong, by key."""
    with pytest.raises(BadInput) as caught:
        load(path, preset, list(overrides))
    return {problem.key: problem for problem in caught.value.problems}


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


@pytest.fixture
def job_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "job.toml"
        path.write_text(text)
        return str(path)

    return write


# --- precedence and kinds of values ------------------------------------------------------------------------


def test_overrides_go_over_the_file_and_the_file_over_the_preset(job_file):
    path = job_file("[optimizer]\nlr = 0.01\n[training]\nsteps = 7\n")
    assert load(None, "tiny").optimizer.lr == 0.003
    assert load(path, "tiny").optimizer.lr == 0.01
    job = load(path, "tiny", ["--optimizer.lr", "0.5", "--training.steps=9"])
    assert (job.optimizer.lr, job.training.steps) == (0.5, 9)


def test_preset_option_goes_over_the_files_preset(job_file):
    assert load(job_file('[model]\npreset = "gpt2"\n'), "tiny").spec.name == "tiny"


def test_only_the_tiny_preset_changes_the_learning_rate(job_file):
    assert load(None, "gpt2").optimizer.lr == 0.001
    assert load(job_file("")).optimizer.lr == 0.003
    assert load(job_file('[model]\npreset = "gpt2"\n')).optimizer.lr == 0.001


def test_the_field_decides_what_an_override_means():
    words = "--run.name 123 --run.folder true --training.compile true --layout.zero 2 --data.source stdlib"
    job = load(None, None, [*words.split(), "--optimizer.betas", "[0.9, 0.99]", "--optimizer.lr", "1"])
    assert (job.run.name, job.run.folder, job.training.compile) == ("123", "true", True)
    assert (job.layout.zero, job.data.source, job.optimizer.betas) == (2, "stdlib", (0.9, 0.99))
    assert isinstance(job.optimizer.lr, float)


def test_a_quoted_override_is_text_without_its_quotes():
    assert load(None, None, ["--run.name", '"a b"']).run.name == "a b"


def test_a_mix_can_be_given_on_the_command_line():
    job = load(None, None, ["--data.source", '["stdlib", { path = "x.txt", weight = 2 }]'])
    assert resolve(job, 1).data.source == [DataSource(path="stdlib"), DataSource(path="x.txt", weight=2.0)]


def test_model_fields_change_the_preset_and_what_follows_from_it():
    spec = load(None, "tiny", ["--model.dim", "64"]).spec
    assert (spec.dim, spec.head_dim) == (64, 8)
    stretched = load(None, "llama3.2-1b", ["--model.rope_scaling.factor", "8"]).spec.rope_scaling
    original = PRESETS["llama3.2-1b"].rope_scaling
    assert stretched is not None
    assert original is not None
    assert stretched == original.model_copy(update={"factor": 8.0})


# --- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toml", "key", "message", "hint"),
    [
        ('[training]\nsteps = "10"', "training.steps", "'10' is text", "an integer, at least 1"),
        ("[training]\nsteps = 10.0", "training.steps", "10.0 is a decimal number", "an integer"),
        ("[training]\nsteps = true", "training.steps", "true is true or false", "an integer"),
        ("[training]\nsteps = 0", "training.steps", "0 is out of range", "at least 1"),
        ("[training]\ncompile = 1", "training.compile", "1 is an integer", "true or false"),
        ("[optimizer]\nlr = nan", "optimizer.lr", "nan is out of range", "above 0"),
        ("[optimizer]\nlr = inf", "optimizer.lr", "inf is out of range", "above 0"),
        ("[optimizer]\nbetas = [0.9]", "optimizer.betas", "", "a list of 2, each a number"),
        ("[optimizer]\nbetas = [0.9, 1.0]", "optimizer.betas", "1.0 is out of range", "below 1"),
        ("[checkpoint]\nasync = 1", "checkpoint.async", "1 is an integer", "true or false"),
        ("[checkpoint]\nasync_ = true", "checkpoint.async_", "no such key", "'async'"),
        (
            '[training]\nprecision = "bf17"',
            "training.precision",
            "'bf17' is not known",
            "Did you mean 'bf16'",
        ),
        ('[training]\nrecompute = "every-0"', "training.recompute", "'every-0'", ""),
        ("[data]\nsource = []", "data.source", "", "a list"),
        ("[data]\nsource = [1]", "data.source", "", "text"),
        ("[trainin]\nsteps = 3", "trainin", "no such section", "Did you mean 'training'?"),
        ("[training]\nstep = 3", "training.step", "no such key", "Did you mean 'steps'?"),
        ("[model]\nlayer = 3", "model.layer", "no such key", "Did you mean 'layers'?"),
        ('[model]\nprset = "tiny"', "model.prset", "no such key", "Did you mean 'preset'?"),
        ('[model]\npreset = "tinny"', "model.preset", "'tinny' is not known", "Did you mean 'tiny'?"),
        ('[model]\npreset = "tiny"\ndim = 0', "model.dim", "0 is out of range", "at least 1"),
        ('[model]\npreset = "tiny"\nheads = 3', "model", "heads = 3", ""),
        ('[model]\npreset = "tiny"\nhf = "x"', "model.preset", "together with model.hf", "Keep one"),
        ("[model]\ndim = 64", "model.vocab_size", "is missing", "model.layers"),
        ("training = 3", "training", "3 is not a section", "[training]"),
        ("model = 3", "model", "3 is not a section", "[model]"),
    ],
)
def test_bad_values_are_named(job_file, toml, key, message, hint):
    found = problems(path=job_file(toml))
    assert key in found
    assert message in found[key].message
    assert hint in found[key].hint


def test_all_problems_are_told_at_once(job_file):
    text = '[training]\nsteps = 0\nseed = -1\n[data]\nsorce = "x"\n[model]\npreset = "nope"\n'
    assert problems(path=job_file(text)).keys() == {
        "training.steps",
        "training.seed",
        "data.sorce",
        "model.preset",
    }


def test_a_syntax_error_is_told_by_file_and_line(job_file):
    path = job_file("[training]\nsteps = 3\nseed = = 4\n")
    (problem,) = problems(path=path).values()
    assert problem.key == f"{path}:3"
    assert "seed = = 4" in problem.hint
    unfinished = job_file('[run]\nname = "')
    assert problems(path=unfinished).keys() == {f"{unfinished}:2"}


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    missing, folder, binary = str(tmp_path / "no.toml"), str(tmp_path), tmp_path / "binary.toml"
    binary.write_bytes(b"[run]\nname = '\xff'\n")
    assert "no such file" in problems(path=missing)[missing].message
    assert "not that of a run" in problems(path=folder)[folder].message
    assert "byte 14" in problems(path=str(binary))[str(binary)].message
    assert problems(path="tiny")["tiny"].hint == "Did you mean --preset tiny?"


@pytest.mark.parametrize(
    ("words", "key", "hint"),
    [
        (["--steps", "3"], "--steps", "Did you mean '--training.steps'?"),
        (["--layers", "3"], "--layers", "Did you mean '--model.layers'?"),
        (["--frobnicate", "3"], "--frobnicate", "fivefold keys"),
        (["--training.steps"], "--training.steps", "--training.steps VALUE"),
        (["--training.steps", "--training.seed", "1"], "--training.steps", "VALUE"),
        (["training.steps", "3"], "training.steps", "--section.key VALUE"),
        (["--run.name.x", "3", "--run.name.y.z", "3"], "run.name", "text"),
        (["--training.steps", "ten"], "training.steps", "an integer"),
    ],
)
def test_bad_overrides_are_named(words, key, hint):
    assert hint in problems(*words)[key].hint


# --- resolving ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "words", "expected"),
    [
        (1, "", (1, 1, 0)),
        (4, "", (1, 4, 3)),
        (4, "--layout.zero 1", (1, 4, 1)),
        (4, "--layout.zero 0", (4, 1, 0)),
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
        (1, "--training.seq_len 2048", "training.seq_len", ["at most 1024", "model.max_seq_len"]),
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
        (2, ["--layout.zero=1"], "under zero = 1"),
        (2, ["--layout.tp=2", "--layout.zero=0"], "no other rank that holds the same weights"),
        (1, [], "no other rank that holds the same weights"),
    ],
)
def test_only_sums_of_whole_gradients_are_compressed(ranks, words, says):
    job = resolve(load(None, "tiny", ["--communication.compress=int8", *words]), ranks)
    (problem,) = check(job, [data_axis])
    assert problem.key == "communication.compress"
    assert says in problem.message


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
    ],
)
def test_a_setting_of_something_that_is_not_there_is_refused(word, lacking):
    key = word.partition("=")[0]
    assert lacking in unresolvable(2, f"--{word}")[key].message


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
    assert resolved(1).training.balance is None


def test_a_resolved_job_no_longer_needs_the_hugging_face_file(tmp_path):
    config = {
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
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    job = load(None, None, ["--model.hf", str(path), "--model.layers", "3"])
    spec = job.spec
    resolved = resolve(job, 1)
    path.unlink()
    assert resolved.model.hf is None
    assert resolved.spec == spec
    assert spec.layers == 3
    assert reread(resolved, tmp_path).spec == spec


def test_a_model_is_made_once_and_a_copy_with_another_has_its_own():
    job = load(None, "tiny")
    assert job.spec is job.spec
    other = Job.model_validate({"model": {"preset": "gpt2"}}).model
    assert job.model_copy(update={"model": other}).spec == PRESETS["gpt2"]
    assert job.model_copy(update={"run": job.run}).spec is job.spec
    assert job.model.model_copy(update={"preset": "gpt2"}).spec == PRESETS["gpt2"]
    assert pickle.loads(pickle.dumps(job)).spec == job.spec
    assert job == load(None, "tiny") == Job.model_validate(job.model_dump(by_alias=True))


# --- writing -----------------------------------------------------------------------------------------------


def reread(job: Job, folder: Path) -> Job:
    (folder / "dumped.toml").write_text(dump_toml(job), encoding="utf-8")
    return load(str(folder / "dumped.toml"))


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
positive = st.floats(1e-12, 1e12)
sections = st.fixed_dictionaries(
    {
        "model": st.sampled_from(
            [
                {},
                {"preset": "gpt2"},
                {"preset": "tiny", "layers": 3},
                {"preset": "llama3.2-1b", "tied": False},
            ]
        ),
        "data": st.fixed_dictionaries(
            {},
            optional={
                "source": text
                | st.lists(st.fixed_dictionaries({"path": text}, optional={"weight": positive}), min_size=1),
                "cache": text,
                "heldout": st.floats(0.01, 0.49),
                "separate_documents": st.booleans(),
            },
        ),
        "training": st.fixed_dictionaries(
            {"global_batch": st.sampled_from([8, 16])},
            optional={
                "seed": st.integers(0, 2**63 - 1),
                "micro_batch": st.sampled_from([1, 2]),
                "precision": st.sampled_from(["bf16", "fp16", "fp32", "fp64"]),
                "clip": positive,
                "compile": st.booleans(),
            },
        ),
        "optimizer": st.fixed_dictionaries(
            {}, optional={"lr": positive, "betas": st.lists(st.floats(0, 0.99), min_size=2, max_size=2)}
        ),
        "layout": st.sampled_from([{}, {"zero": 0}, {"zero": 2}, {"dp_replicate": 2}]),
        "run": st.fixed_dictionaries({}, optional={"wandb": text, "tensorboard": st.booleans()}),
    }
)


@settings(max_examples=150, deadline=None)
@given(sections, st.sampled_from([2, 4]))
def test_a_resolved_job_survives_every_way_of_passing_it_on(tmp_path_factory, tree, ranks):
    resolved = resolve(Job.model_validate(tree), ranks)
    assert resolve(resolved, ranks) == resolved
    assert reread(resolved, tmp_path_factory.getbasetemp()) == resolved
    assert pickle.loads(pickle.dumps(resolved)) == resolved
    assert Job.model_validate_json(resolved.model_dump_json(by_alias=True)) == resolved


def test_awkward_text_survives_toml(tmp_path):
    name = 'quote " backslash \\ newline \n tab \t delete \x7f bell \x07 snowman \u2603 beyond \U0001f600'
    job = Job.model_validate({"run": {"wandb": name}})
    assert reread(job, tmp_path).run.wandb == name


def test_every_key_has_a_description():
    keys = {key.name: key for key in list_keys()}
    assert {"model.preset", "model.layers", "training.steps", "checkpoint.async"} <= keys.keys()
    assert [name for name, key in keys.items() if not key.description] == []


def test_reading_a_job_does_not_import_torch():
    code = "import sys, fivefold.config; fivefold.config.load(); print({'torch', 'numpy'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"
