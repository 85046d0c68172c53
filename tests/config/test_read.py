"""Jobs from a preset, a file and settings: what goes over what, and what is refused."""

from __future__ import annotations

import pytest

from fivefold.config import DataSource, load, resolve
from fivefold.models.presets import PRESETS
from fivefold.problems import BadInput, Problem


def problems(*overrides: str, path: str | None = None, preset: str | None = None) -> dict[str, Problem]:
    """What `load` finds wrong, by key."""
    with pytest.raises(BadInput) as caught:
        load(path, preset, list(overrides))
    return {problem.key: problem for problem in caught.value.problems}


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
        ("[optimizer]\nema = 1.0", "optimizer.ema", "1.0 is out of range", "above 0 and below 1"),
        ("[data]\nheldout = 0.5", "data.heldout", "0.5 is out of range", "above 0 and below 0.5"),
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
