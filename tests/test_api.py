"""Python's door: keyword arguments in, typed results out, one kind of exception."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, assert_type

import pytest

import fivefold
from fivefold.api.jobs import Sections
from fivefold.api.words import in_python
from fivefold.commands.common import read_job
from fivefold.config import dump_toml

SMALL: Any = {
    "model": {"layers": 2, "dim": 32, "ffn": 32},
    "data": {"source": "random"},
    "training": {"steps": 3, "seq_len": 16, "global_batch": 4, "validate_every": 2, "validate_batches": 1},
    "run": {"tensorboard": False},
}


def script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(text)
    return subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=200, cwd=folder)


def refused(function: Any, *args: Any, **more: Any) -> str:
    with pytest.raises(fivefold.BadInput) as caught:
        function(*args, **more)
    return str(caught.value)


@pytest.fixture(scope="module")
def plan() -> fivefold.Plan:
    return fivefold.plan("llama3-8b", gpus=8, global_batch=32, tokens=1e9, price=2)


# --- the module --------------------------------------------------------------------------------------------


def test_importing_and_looking_around_imports_nothing_heavy() -> None:
    text = "import sys, fivefold; dir(fivefold); print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_planning_and_jobs_need_no_torch() -> None:
    text = (
        "import sys, fivefold; fivefold.plan('tiny', cluster='laptop', gpus=1).job(); fivefold.simulate;"
        "fivefold.read_metrics; fivefold.train; fivefold.verify; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_name_is_listed_and_there() -> None:
    listed = [name for name in dir(fivefold) if not name.startswith("__")]
    assert listed == sorted(fivefold.__all__)
    assert all(getattr(fivefold, name) is not None for name in listed)
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        fivefold.plam  # noqa: B018


def test_problems_are_told_in_pythons_words() -> None:
    assert in_python("With --seq-len 512 and the same: 1 s.") == "With seq_len=512 and the same: 1 s."
    assert in_python("--tokens 1.5T --gpus auto.") == 'tokens="1.5T" gpus="auto".'
    assert in_python("'auto' needs --tokens and --deadline") == "'auto' needs tokens and deadline"
    assert in_python("'--gpus' is what you gave") == "'--gpus' is what you gave"
    assert in_python("--training.steps") == "training.steps"


# --- plan --------------------------------------------------------------------------------------------------


def test_a_plan_prints_as_a_short_table(plan: fivefold.Plan) -> None:
    assert_type(plan, fivefold.Plan)
    assert repr(plan) == str(plan) == plan.table
    first, header, best, *_ = plan.table.splitlines()
    assert first == "llama3-8b on 8 x H100 SXM (dgx-h100), 32 sequences of 8,192 tokens, bf16"
    assert header.split() == ["layout", "step", "tok/s/GPU", "MFU", "GiB", "days", "cost"]
    assert plan.best is not None
    assert f"{plan.best.step_time:.4g} s" in best
    assert len(plan.table.splitlines()) <= 20
    assert max(len(repr(part)) for part in (plan, plan.best, plan.searched, plan.request.cluster)) < 2500
    assert len(repr(plan.best)) < 200
    assert len(repr(plan.searched)) < 250


def test_a_plan_is_what_the_command_prints(plan: fivefold.Plan) -> None:
    told = plan.as_json()
    row = told["best"][0]
    assert (plan.mfu, plan.days, plan.cost) == (row["mfu"], row["days"], row["cost"])
    assert (plan.gpus, told["gpus"]) == (8, 8)
    same = fivefold.plan(model="llama3-8b", gpus="8", global_batch=32, tokens="1B", price=2.0).as_json()
    assert {**same, "seconds": 0} == {**told, "seconds": 0}


def test_a_plan_takes_keys_by_section_and_by_name() -> None:
    here: dict[str, Any] = {"cluster": "laptop", "gpus": 4}
    by_section = fivefold.plan("tiny", **here, layout={"tp": 2}, training={"micro_batch": 2})
    by_name = fivefold.plan("tiny", {"layout.tp": 2, "training.micro_batch": 2}, **here)
    assert by_section.request.fixed == by_name.request.fixed == {"tp": 2, "micro_batch": 2}
    assert by_section.best is not None
    assert by_section.best.keys == by_name.best.keys if by_name.best else False
    assert (by_section.job().layout.tp, by_section.job().training.micro_batch) == (2, 2)
    assert "why: tp=4, but layout.tp fixes it" in refused(by_section.why, tp=4)


def test_why_takes_keywords_and_prints_as_its_sentence(plan: fivefold.Plan) -> None:
    reason = plan.why(tp=8)
    assert reason.verdict == "slower"
    assert repr(reason).splitlines()[0] == reason.sentence
    assert "Did you mean 'tp'?" in refused(plan.why, tpp=8)
    assert refused(plan.why, tp="8").startswith("why: tp: '8' is text")
    assert "dp_shard" in refused(plan.why, dp=8)


def test_a_plans_job_trains_as_the_best_layout_says(plan: fivefold.Plan) -> None:
    assert plan.best is not None
    job = plan.job()
    assert_type(job, fivefold.Job)
    row = plan.as_json()["best"][0]
    assert row["layout"].items() <= job.layout.model_dump().items()
    assert row["training"].items() <= job.training.model_dump().items()
    assert job.training.steps == round(1e9 / (32 * 8192))
    other = plan.job({"training.steps": 7}, optimizer={"lr": 1e-4})
    assert (other.training.steps, other.optimizer.lr, other.layout) == (7, 1e-4, job.layout)
    assert "Did you mean 'steps'?" in refused(plan.job, training={"stpes": 7})


def test_where_nothing_fits_the_plan_says_what_would() -> None:
    none = fivefold.plan("llama3-8b", gpus=1)
    assert none.best is None
    assert none.days is none.cost is none.mfu is None
    assert "No layout fits" in repr(none)
    assert "With gpus=" in none.nearest()
    with pytest.raises(fivefold.BadNews, match="No layout fits"):
        none.job()


def test_what_is_too_late_is_said() -> None:
    late = fivefold.plan("tiny", cluster="laptop", gpus=1, tokens=1e12, deadline=1)
    assert late.late is not None
    assert 'gpus="auto"' in late.late
    assert late.table.endswith(late.late)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "llama3-8"}, "model: 'llama3-8' is not known\n    Did you mean 'llama3-8b'?"),
        ({}, "model: not given, nor hf"),
        ({"model": "tiny", "gpus": 0}, "gpus: 0 is out of range"),
        ({"model": "tiny", "gpus": "auto"}, "gpus: 'auto' needs tokens and deadline"),
        ({"model": "tiny", "seq_len": "8k"}, "seq_len: '8k' is text\n    Allowed: an integer, at least 1."),
        ({"model": "tiny", "global_batch": 1.5}, "global_batch: 1.5 is a decimal number"),
        ({"model": "tiny", "price": "cheap"}, "price: 'cheap' is out of range"),
        ({"model": "tiny", "deadline": 3}, "deadline: is given without tokens"),
        ({"model": "tiny", "tokens": "lots"}, "tokens: 'lots' is not a quantity"),
        ({"model": "tiny", "tokens": -1e9}, "tokens: '-1000000000.0' is not a quantity"),
        ({"model": "tiny", "precision": "bf61"}, "precision: 'bf61' is not known\n    Did you mean 'bf16'?"),
        ({"model": "tiny", "compile": "yes"}, "compile: 'yes' is text\n    Allowed: true or false."),
        ({"model": "tiny", "layout": {"tp": "8"}}, "layout.tp: '8' is text"),
        ({"model": "tiny", "overrides": 8}, "overrides: 8 is a int"),
        ({"model": "tiny", "data": {"source": "x"}}, "data.source: 'x': a plan does not depend on it"),
        (
            {"model": "tiny", "seq_len": 64, "training": {"seq_len": 64}},
            "seq_len: given together with training.seq_len",
        ),
        ({"model": "tiny", "cluster": "dgx-h10"}, "Did you mean 'dgx-h100'?"),
    ],
)
def test_bad_arguments_are_refused_by_their_names(given: dict[str, Any], said: str) -> None:
    text = refused(fivefold.plan, **given)
    assert said in text
    assert "--" not in text


# --- jobs --------------------------------------------------------------------------------------------------


def test_settings_by_section_and_by_key_are_the_same() -> None:
    by_section = fivefold.job("tiny", training={"steps": 20}, layout={"zero": 3})
    by_key = fivefold.job("tiny", {"training.steps": 20, "layout.zero": 3})
    mixed = fivefold.job("tiny", {"training": {"steps": 9}, "layout.zero": 3}, training={"steps": 20})
    words = read_job(["--training.steps", "20", "--layout.zero", "3"], "tiny")
    assert by_section == by_key == mixed == words
    assert words == fivefold.load_job(None, "tiny", ["--training.steps=20", "--layout.zero=3"])
    assert repr(by_section) == (
        "Job(model.preset='tiny', training.steps=20, optimizer.lr=0.003, layout.zero=3)"
    )


def test_settings_go_over_a_file_and_leave_the_rest_of_a_section(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[training]\nsteps = 5\nseq_len = 64\n")
    job = fivefold.job(file=file, training={"steps": 7}, run={"folder": tmp_path / "run"})
    assert (job.training.steps, job.training.seq_len) == (7, 64)
    assert job.run.folder == str(tmp_path / "run")
    file.write_text(dump_toml(job))
    assert fivefold.job(file=file) == job


def test_settings_of_the_caller_stay_as_they_are() -> None:
    training = {"steps": 5}
    fivefold.job("tiny", {"training": training}, training={"seed": 1})
    assert training == {"steps": 5}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preset": "tinny"}, "Did you mean 'tiny'?"),
        ({"training": {"stpes": 3}}, "training.stpes: there is no such key\n    Did you mean 'steps'?"),
        ({"trainning": {}}, "trainning: there is no such section\n    Did you mean 'training'?"),
        ({"overrides": {"training.stpes": 3}}, "Did you mean 'steps'?"),
        ({"overrides": ["--training.steps", "3"]}, "Give a mapping"),
        ({"training": 3}, "training: 3 is not a section"),
        ({"layout": {"zero": 4}}, "layout.zero: 4 is out of range"),
        ({"file": "nowhere.toml"}, "nowhere.toml: there is no such file"),
    ],
)
def test_bad_jobs_are_refused_with_a_hint(given: dict[str, Any], said: str) -> None:
    assert said in refused(fivefold.job, **given)


def test_a_job_made_by_hand_is_refused_alike() -> None:
    assert refused(fivefold.Job, training={"stpes": 3}) == refused(fivefold.job, training={"stpes": 3})


def test_sections_have_their_names() -> None:
    assert Sections.__annotations__.keys() == fivefold.Job.model_fields.keys()


# --- simulate ----------------------------------------------------------------------------------------------


def test_a_simulated_step_has_figures_and_prints_as_a_timeline(tmp_path: Path) -> None:
    job = fivefold.job("llama3-8b", layout={"pp": 4}, training={"global_batch": 16})
    step = fivefold.simulate(job, cluster="dgx-h100", gpus=8)
    assert_type(step, fivefold.Simulation)
    assert step.step_time == step.figures["step_time_s"]
    assert step.exposed["dp"] == pytest.approx(step.figures["exposed"]["dp"] / 1e3)
    assert 0 < step.bubble < 1
    assert 0 < step.optimizer < step.step_time
    assert (step.memory_gib, step.fits) == (step.figures["memory_gib"], True)
    lines = repr(step).splitlines()
    assert [line[:6] for line in lines[1:5]] == [f"rank {rank}" for rank in range(4)]
    assert lines[5].startswith(f"step              {step.step_time * 1e3:,.1f} ms")
    assert len(repr(step.shown)) < 150
    step.write_png(tmp_path / "step.png")
    step.write_trace(tmp_path / "step.json")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert "traceEvents" in (tmp_path / "step.json").read_text()
    assert "there is no folder" in refused(step.write_png, tmp_path / "no" / "step.png")


def test_a_long_timeline_is_cut() -> None:
    step = fivefold.simulate(fivefold.job("llama3-8b", layout={"pp": 32}, training={"global_batch": 32}))
    assert "... and 16 rows more" in repr(step)
    assert len(repr(step).splitlines()) < 25


def test_what_cannot_be_simulated_is_refused() -> None:
    assert refused(fivefold.simulate, fivefold.job(), gpus=0).startswith("gpus: is 0")
    assert refused(fivefold.simulate, fivefold.job(), gpus="8").startswith("gpus: is 8")
    assert "fivefold.job" in refused(fivefold.simulate, "tiny")


# --- train, verify, read -----------------------------------------------------------------------------------


def test_train_verify_and_read(tmp_path: Path) -> None:
    job = fivefold.job("tiny", **SMALL)
    verdict = fivefold.verify(job, nproc=1)
    assert_type(verdict, fivefold.Verdict)
    assert verdict.ok
    assert repr(verdict).startswith("same (")
    run = tmp_path / "run"
    summary = fivefold.train(job, nproc=1, run=run)
    assert_type(summary, fivefold.Summary)
    assert repr(summary).startswith("3 steps, 192 tokens in 0:0")
    metrics = fivefold.read_metrics(summary.folder)
    assert [step.step for step in metrics] == metrics.column("step") == [1, 2, 3]
    assert metrics[-1].loss == summary.loss
    assert metrics[-1].val_loss == summary.val_loss
    assert [step.val_loss is None for step in metrics] == [True, False, False]
    assert [line.split()[0] for line in repr(metrics).splitlines()] == ["step", "1", "2", "3"]
    assert "Did you mean 'loss'?" in refused(metrics.column, "los")

    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": null, "attempt": 2}\n{"step": 5, "lo')  # a killed run's half line
    torn = fivefold.read_metrics(run)
    assert len(torn) == 4
    assert torn[3].loss != torn[3].loss
    assert [step.step for step in torn[1:3]] == [2, 3]
    assert "Did you mean" in refused(fivefold.read_metrics, tmp_path / "runs")
    assert str(run) in refused(fivefold.read_metrics, tmp_path)
    assert "is a file" in refused(fivefold.read_metrics, run / "metrics.jsonl")


def test_a_long_run_prints_as_a_short_table(tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "loss": 1.0, "attempt": 1}}\n' for step in range(1, 1001)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    shown = repr(fivefold.read_metrics(tmp_path)).splitlines()
    assert len(shown) == 12
    assert shown[4].split()[0] == "..."
    assert shown[-1].split()[:2] == ["1000", "1.0000"]


def test_bad_launches_are_refused_in_pythons_words() -> None:
    assert refused(fivefold.train, fivefold.job(), nproc=0).startswith("nproc: 0 is out of range")
    assert refused(fivefold.verify, fivefold.job(), nproc="2").startswith("nproc: 2 is out of range")
    assert "fivefold.job" in refused(fivefold.train, "tiny")


@pytest.mark.parametrize("verb", ["train", "verify"])
def test_a_script_without_a_guard_is_told_in_one_line(tmp_path: Path, verb: str) -> None:
    text = f"import fivefold\nfivefold.{verb}(fivefold.job('tiny', **{SMALL!r}), nproc=2)\n"
    done = script(tmp_path, text)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(str(tmp_path / "script.py"))
    assert '`if __name__ == "__main__":`' in line


def test_a_script_with_a_guard_trains(tmp_path: Path) -> None:
    text = f"""
import fivefold
print("imported")
if __name__ == "__main__":
    print(fivefold.train(fivefold.job("tiny", **{SMALL!r}), nproc=2, run="run"))
"""
    done = script(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert "3 steps, 192 tokens" in done.stdout
    assert len(fivefold.read_metrics(tmp_path / "run")) == 3
