"""A user's own model: how it is found, what is known of it, and what is refused before any rank starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fivefold
from fivefold.axes.checks import check
from fivefold.config import Job, dump_toml, load, resolve, with_own_model
from fivefold.models.flops import flops_per_token
from fivefold.models.inventory import parameter_count, parameters
from fivefold.models.own.decoder import first_values
from fivefold.models.own.reference import absolute, found, reference_of
from fivefold.models.own.spec import OwnSpec
from fivefold.problems import BadInput
from fivefold.report.simulated_job import asked
from fivefold.training.meter import Meter
from fivefold.training.promise import planned
from tests.models import own_models
from tests.models.own_models import DIM, VOCABULARY, Good

MODELS = "tests.models.own_models"
ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT}/examples/own_model.py:OwnModel"


def job_of(name: str, **sections: dict[str, Any]) -> Job:
    usual: dict[str, Any] = {"training": {"seq_len": 16, "global_batch": 8}, "data": {"source": "random"}}
    return Job.model_validate({"model": {"module": f"{MODELS}:{name}"}, **usual, **sections})


def refused(action: Any, *args: Any, **named: Any) -> str:
    with pytest.raises(BadInput) as caught:
        action(*args, **named)
    return str(caught.value)


# --- what is known of it -----------------------------------------------------------------------------------


def test_its_numbers_come_from_the_module_itself() -> None:
    spec = job_of("Good").spec
    assert isinstance(spec, OwnSpec)
    assert (spec.name, spec.vocab_size, spec.dim, spec.layers) == ("Good", VOCABULARY, DIM, 4)
    assert (spec.max_seq_len, spec.takes_documents, spec.tied) == (64, True, False)
    assert not Job.model_validate({"model": {"module": EXAMPLE}}).spec.takes_documents  # type: ignore[attr-defined]


def test_the_inventory_is_the_modules_own_parameters_part_by_part() -> None:
    listed = parameters(job_of("Good").spec)
    true = {name: tuple(p.shape) for name, p in Good().named_parameters()}
    assert {p.name: p.shape for p in listed} == true
    parts = list(dict.fromkeys(p.part for p in listed))
    assert parts == ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert all(p.name.startswith(f"{p.part}.") for p in listed)
    assert parameter_count(job_of("Good").spec) == sum(p.numel() for p in Good().parameters())


def test_flops_are_six_a_parameter_and_token_without_the_embedding_and_said_so() -> None:
    job = resolve(job_of("Good"), 1)
    of = Good()
    counted = sum(p.numel() for part in (of.blocks, of.head) for p in part.parameters())
    assert flops_per_token(job.spec, 16).model == 6 * counted
    meter = Meter(job, torch.device("cpu"))
    meter.peak = 1e12
    assert meter.convention == "6 FLOPs a token and parameter of blocks and head, dense peak 1 TFLOP/s"


def test_first_values_follow_from_the_seed_alone_and_include_buffers() -> None:
    spec = job_of("Good").spec
    assert isinstance(spec, OwnSpec)
    before = torch.get_rng_state()
    one, again, other = (first_values(spec, seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert {"embedding.wider.weight", "blocks.0.waves.table", "blocks.3.waves.table"} <= one.keys()
    assert all(torch.equal(value, again[name]) for name, value in one.items())
    assert not torch.equal(one["blocks.0.waves.table"], other["blocks.0.waves.table"])


# --- how it is found ---------------------------------------------------------------------------------------


def test_a_class_a_function_and_a_file_are_found_by_their_reference() -> None:
    assert reference_of(Good) == f"{MODELS}:Good"
    assert found(f"{MODELS}:Good") is Good
    assert found(reference_of(own_models.made_by_a_function)) is own_models.made_by_a_function
    assert job_of("made_by_a_function").spec.dim == DIM
    own = found(EXAMPLE)
    assert found(EXAMPLE) is own
    assert reference_of(own) == EXAMPLE  # a module outside of packages is known by its file


def test_a_relative_file_becomes_absolute_when_the_job_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["--model.module", "examples/own_model.py:OwnModel", "--data.separate_documents", "false"]
    job = resolve(load(overrides=words), 1)
    assert job.model.module == EXAMPLE == absolute(EXAMPLE)
    assert resolve(job, 1) == job
    assert f'module = "{EXAMPLE}"' in dump_toml(job)


def test_a_class_takes_the_place_of_the_key() -> None:
    assert with_own_model(Job(), Good).model.module == f"{MODELS}:Good"
    assert with_own_model(Job(), None) == Job()
    assert "model.preset: given together with model.module" in refused(
        with_own_model, load(preset="tiny"), Good
    )


def test_what_has_no_name_to_be_found_by_is_refused() -> None:
    class Inside(Good):
        pass

    assert "is defined inside a function" in refused(with_own_model, Job(), Inside)
    assert "is defined inside a function" in refused(with_own_model, Job(), lambda: Good())
    assert "an object of Good is not a class" in refused(with_own_model, Job(), Good())


@pytest.mark.parametrize(
    ("reference", "message", "hint"),
    [
        ("OwnModel", "'OwnModel' names no class", 'Write "file.py:Name"'),
        ("examples/own_modle.py:OwnModel", "there is no file 'examples/own_modle.py'", "own_model.py'?"),
        ("examples/own_model.py:OwnModle", "there is no 'OwnModle'", "Did you mean 'OwnModel'?"),
        ("tests.models.own_modles:Good", "there is no module 'tests.models.own_modles'", "installed"),
        (f"{MODELS}:Goood", "there is no 'Goood'", "Did you mean 'Good'?"),
        (f"{MODELS}:NOT_CALLABLE", "is int, not a class", "Name a class"),
        (f"{MODELS}:returns_a_number", "made a int", "torch.nn.Module"),
        (f"{MODELS}:WantsArguments", "cannot be built: TypeError", "without arguments"),
    ],
)
def test_a_wrong_reference_is_told_with_what_was_meant(
    reference: str, message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    told = refused(load, overrides=["--model.module", reference])
    assert told.startswith("model.module: ")
    assert message in told
    assert hint in told


def test_a_file_that_fails_is_told_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import torch\n\n1 / 0\n")
    told = refused(load, overrides=["--model.module", f"{file}:Model"])
    assert "cannot be imported: ZeroDivisionError" in told
    assert "(broken.py:3)" in told


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    imports = "import fivefold\nfrom tests.models.own_models import Good\n\nclass Mine(Good):\n    pass\n\n"
    script.write_text(imports + "fivefold.train(fivefold.load_job(), model=Mine)\n")
    path = f"import sys; sys.path[:0] = ['{ROOT}', '{ROOT}/src']; import runpy; "
    started = f"{path} runpy.run_path('{script}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", started], capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert "starts a run while it is imported" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr


def test_a_job_without_one_is_read_without_torch() -> None:
    code = "import sys, fivefold; fivefold.load_job(preset='tiny').spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


# --- what breaks the contract ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("NoEmbedding", "the model has no `embedding`", "tokens [B, S] -> x [B, S, dim]"),
        ("NoHead", "the model has no `head`", "logits [B, S, vocabulary]"),
        ("ListOfBlocks", "`blocks` is a list", "torch.nn.ModuleList"),
        ("EmptyBlocks", "`blocks` is empty", "at least one block"),
        ("Outside", "'bias' belongs to none of embedding, blocks and head", "move it"),
        ("Tied", "'head.weight' is the same parameter as 'embedding.weight'", "tied"),
        ("Frozen", "'head.1.bias' is frozen", "use a buffer"),
        ("Scalar", "'blocks.2.scale' has the shape []", "such as [1]"),
        ("NothingToTrain", "`blocks.2` has no parameters", "into the part beside it"),
        ("PlainTensor", "'blocks.1.mask' is a plain tensor", "register_buffer('mask'"),
        ("Dropping", "'embedding.1' drops numbers by chance (Dropout, 0.1)", "set it to 0"),
        ("BatchNorm", "'head.0' is BatchNorm1d", "use LayerNorm"),
        ("Mixed", "of blocks.0 and blocks.4 only one takes documents", "or of none"),
        ("Narrowing", "`blocks.2` returned [2, 8, 23] on tokens [2, 8]", "here [2, 8, 24]"),
        ("FlatHead", "`head` returned [2, 536]", "[B, S, vocabulary]"),
        ("FlatEmbedding", "`embedding` returned [2, 192]", "[B, S, dim]"),
        ("SmallTable", "`embedding` looks up 66 tokens, `head` predicts 67", "the same vocabulary"),
        (
            "Unused",
            "'blocks.3.forgotten.weight' does not change what `blocks.3` returns",
            "leave out what is not used",
        ),
        ("ChangesInput", "`blocks.2` changes its input in place", "x = x + y"),
        ("OneDtype", "`blocks.2` returned float32 on tokens [2, 8] in float64", "the dtype that it is given"),
        ("TwoResults", "`blocks.2` returned a tuple", "one tensor"),
    ],
)
def test_a_module_that_breaks_the_contract_is_refused_with_the_part(
    name: str, message: str, hint: str
) -> None:
    told = refused(load, overrides=["--model.module", f"{MODELS}:{name}"])
    assert told.startswith("model.module: ")
    assert message in told
    assert hint in told


def test_it_is_tried_with_the_jobs_own_length() -> None:
    assert job_of("ShortTable", data={"separate_documents": False}).spec.dim == DIM
    told = refused(job_of, "ShortTable", training={"seq_len": 17, "global_batch": 8})
    assert "`head` failed on tokens [2, 17]" in told
    told = refused(resolve, job_of("Good", training={"seq_len": 65, "global_batch": 8}), 1)
    assert told.startswith("training.seq_len: 65 is longer than model.module takes\n    Use at most 64")


# --- what cannot be had with it ----------------------------------------------------------------------------


def test_documents_are_kept_apart_by_the_blocks_or_not_at_all() -> None:
    told = refused(resolve, job_of("Plain"), 1)
    assert told.startswith("data.separate_documents: true, but the blocks of model.module take no documents")
    assert "Set data.separate_documents = false" in told
    resolve(job_of("Plain", data={"separate_documents": False}), 1)
    resolve(job_of("Good"), 1)


def test_a_loss_in_chunks_is_refused_with_the_reason() -> None:
    told = refused(resolve, job_of("Good", training={"loss_chunk": 8}), 1)
    assert told.startswith("training.loss_chunk: 8: what the head of model.module does to make logits is not")
    assert "set it to 0" in told


@pytest.mark.parametrize("axis", ["tp", "cp", "ep"])
def test_axes_that_reach_into_layers_are_refused(axis: str) -> None:
    job = job_of("Good", layout={axis: 2})

    def all_checks() -> None:
        problems = check(resolve(job, 2))
        if problems:
            raise BadInput(problems)

    told = refused(all_checks)
    assert told.startswith(f"layout.{axis}: 2 ")
    assert "model.module" in told
    assert "is not known" in told


def test_other_keys_of_the_model_are_refused() -> None:
    told = refused(load, overrides=["--model.module", f"{MODELS}:Good", "--model.layers", "3"])
    assert told.startswith("model.layers: given together with model.module")
    told = refused(load, preset="tiny", overrides=["--model.module", f"{MODELS}:Good"])
    assert told.startswith("model.preset: given together with model.module")


def test_the_planner_refuses_in_one_sentence() -> None:
    takes = "The planner takes presets and Hugging Face configs"
    auto = refused(planned, job_of("Good", layout={"auto": True}), 2, "cpu")
    assert auto.startswith("layout.auto: true: the time and memory of a model of your own are not known")
    cluster = refused(planned, job_of("Good", cluster={"preset": "laptop"}), 1, "cpu")
    assert cluster.startswith("cluster.preset: 'laptop'")
    simulated = refused(asked, job_of("Good"), None, None)
    assert simulated.startswith("model.module: ")
    named = refused(fivefold.plan, model=f"{MODELS}:Good")
    assert named.startswith("model: ")
    assert all(takes in told for told in (auto, cluster, simulated, named))
