"""Jobs written and read again."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config import Job, dump_toml, list_keys, load, resolve


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
