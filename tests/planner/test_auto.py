"""`layout.auto`: the planner fills in what a job's layout leaves open, and says what it promises."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.axes.checks import check
from fivefold.config import Job, load, resolve
from fivefold.ledger.setup import Setup
from fivefold.planner.auto import cluster_of, laid_out
from fivefold.planner.search.planned import planned_alone
from fivefold.problems import BadInput, BadNews

LARGE = ["--training.seq_len=8192", "--training.global_batch=32", "--layout.auto=true"]


def job(*words: str, preset: str = "llama3-8b") -> Job:
    return load(None, preset, [*LARGE, *words])


def test_the_chosen_layout_is_allowed_and_promised() -> None:
    found, promise = laid_out(job("--cluster.preset=dgx-h100"), 8, "cuda", "")
    resolved = resolve(found, 8, "cuda")
    assert check(resolved) == []
    assert not resolved.layout.auto
    again = planned_alone(Setup.of(resolved), cluster_of(resolved, "cuda", ""))
    assert again.step_time == pytest.approx(promise.step_time)
    assert float(again.memory.device) == pytest.approx(float(promise.memory.device))


def test_keys_that_the_job_gives_stay() -> None:
    words = ["--cluster.preset=dgx-h100", "--layout.tp=4", "--training.micro_batch=2"]
    found, _ = laid_out(job(*words), 8, "cuda", "")
    assert (found.layout.tp, found.training.micro_batch) == (4, 2)


def test_settings_that_are_not_chosen_stay_and_are_planned_with() -> None:
    words = ["--cluster.preset=dgx-h100", "--layout.tp=4", "--layout.sequence_parallel=false"]
    found, promise = laid_out(job(*words, "--training.compile=true", "--layout.bucket_mb=50"), 8, "cuda", "")
    assert not found.layout.sequence_parallel
    setup = promise.setup
    assert (setup.sequence_parallel, setup.compile, setup.bucket_mb) == (False, True, 50)
    resolved = resolve(found, 8, "cuda")
    assert check(resolved) == []
    assert Setup.of(resolved) == setup


@pytest.mark.parametrize("zero", [0, 3])
def test_gradients_in_8_bits_are_planned_for_every_stage(zero: int) -> None:
    words = ["--cluster.preset=dgx-h100", "--communication.compress=int8", f"--layout.zero={zero}"]
    found, promise = laid_out(load(None, "gpt2-xl", [*words, "--layout.auto=true"]), 8, "cuda", "")
    assert (promise.setup.zero, promise.setup.compress) == (zero, "int8")
    assert check(resolve(found, 8, "cuda")) == []


def test_without_a_cluster_the_devices_say_which() -> None:
    assert cluster_of(job(), "cuda", "NVIDIA H200").name == "dgx-h200"
    assert cluster_of(job(), "cpu", "cpu").name == "laptop"
    with pytest.raises(BadInput, match="cluster"):
        cluster_of(job(), "cuda", "Voodoo 2")


def test_no_layout_that_fits_is_bad_news() -> None:
    with pytest.raises(BadNews, match="GiB"):
        laid_out(job("--cluster.preset=dgx-h100"), 1, "cuda", "")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--layout.tp=3"], "layout"),
        (
            ["--training.global_batch=33", "--layout.dp_replicate=1", "--layout.dp_shard=8"],
            "training.global_batch",
        ),
    ],
)
def test_what_no_layout_can_have_is_refused_in_the_jobs_own_words(words: list[str], key: str) -> None:
    with pytest.raises(BadInput) as caught:
        laid_out(job("--cluster.preset=dgx-h100", *words), 8, "cuda", "")
    assert any(problem.key.startswith(key) for problem in caught.value.problems)


def test_a_job_that_is_still_the_planners_is_not_resolved() -> None:
    with pytest.raises(ValueError, match="planner"):
        resolve(job(), 8, "cuda")


def test_two_clusters_are_one_too_many() -> None:
    given: dict[str, Any] = {"cluster": {"preset": "laptop", "file": "here.toml"}}
    with pytest.raises(BadInput, match=r"cluster\.preset"):
        resolve(Job.model_validate(given), 1)
