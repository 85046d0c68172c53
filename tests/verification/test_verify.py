"""`verify` says "same" of good layouts, and what it did not exercise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

import fivefold
from fivefold.problems import BadInput
from fivefold.verification import verify
from tests.cases import SPEC, TIED, Case
from tests.verification.draw import drawn

MOE = SPEC | {"experts": 4, "experts_per_token": 2}


def assert_same(case: Case, precision: Any = "fp64") -> fivefold.Verdict:
    verdict = verify(case.job(), case.ranks, precision=precision)
    assert verdict.ok, verdict.sentence()
    assert verdict.axis is None
    assert verdict.worst_gradient_error < 1e-12
    assert verdict.sentence().startswith("same (worst ")
    return verdict


def test_a_good_layout_is_the_same_in_the_jobs_precision_too() -> None:
    training = {"micro_batch": 1, "recompute": "every-3", "precision": "bf16"}
    layout = {"zero": 2, "dp_replicate": 1, "dp_shard": 2}
    case = Case("good", 2, layout, training, {"ema": 0.9}, TIED | {"layers": 9, "vocab_size": 1001})
    verdict = assert_same(case, "job")
    exact, lower = verdict.parts
    assert (exact.precision, lower.precision) == ("fp64", "bf16")
    assert lower.device == "cpu"
    assert 1e-3 < lower.worst_gradient.error <= lower.worst_gradient.bound < 0.1
    assert verdict.shrunk["model.layers"] == (9, 4)
    assert verdict.shrunk["model.vocab_size"][1] % 2 == 1
    assert verdict.rows == 2
    assert any("GPU kernels and NCCL" in each for each in verdict.not_exercised)
    assert not any("--precision job" in each for each in verdict.not_exercised)
    assert "update of the average" in verdict.lines()[1]


def test_what_rounds_or_deals_by_design_is_left_out_and_said() -> None:
    case = Case("int8", 2, {"zero": 0}, {"precision": "fp16"}, spec=MOE, communication={"compress": "int8"})
    verdict = assert_same(case, "job")
    said = "\n".join(verdict.not_exercised)
    assert "communication.compress = 'int8', which rounds gradients" in said
    assert "learned routing in fp16" in said
    assert "tp_overlap" not in said


def test_muon_is_compared_in_float64_alone() -> None:
    training, layout = {"precision": "bf16", "micro_batch": 1}, {"dp_shard": 2, "zero": 3}
    case = Case("muon", 2, layout, training, {"name": "muon", "ema": 0.9}, spec=MOE)
    verdict = assert_same(case, "job")
    update = next(each for each in verdict.parts[0].differences if each.quantity == "update")
    assert update.error < 1e-11
    assert any("AdamW stood in for it" in each for each in verdict.not_exercised)


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_moments_in_fewer_bits_are_held_to_their_rounding(states: str) -> None:
    case = Case("states", 2, {"zero": 3}, {"precision": "fp32"}, {"states": states, "ema": 0.9}, TIED)
    verdict = assert_same(case, "job")
    assert not any("optimizer.states" in each for each in verdict.not_exercised)
    bounds = {each.quantity: each.bound for each in verdict.parts[1].differences}
    assert bounds["gradient"] == bounds["update"] < 1e-5
    unasked = assert_same(case)
    assert any(f"optimizer.states = '{states}', which rounds" in each for each in unasked.not_exercised)


def test_what_was_not_asked_for_is_said() -> None:
    case = Case("compiled", 1, training={"compile": True, "precision": "bf16"}, spec=SPEC | {"layers": 2})
    verdict = assert_same(case)
    said = "\n".join(verdict.not_exercised)
    assert "rounding in bf16: ask for it with --precision job" in said
    assert "training.compile: ask for it with --precision job" in said
    assert "clipping" not in said


@pytest.mark.parametrize("precision", ["half", "fp32"])
def test_an_unknown_precision_is_refused(precision: Any) -> None:
    with pytest.raises(BadInput, match=r"--precision: '.*' is unknown"):
        verify(Case("bad").job(), 1, precision=precision)


def test_the_command_answers_in_json() -> None:
    command = [sys.executable, "-m", "fivefold", "verify", "--preset", "tiny", "--nproc", "2", "--json"]
    settings = ["--model.layers", "2", "--training.precision", "fp32", "--precision", "job"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"] is True
    assert answer["axis"] is None
    assert 0 < answer["worst_gradient_error"] < 1e-12
    assert answer["worst_parameter"].startswith(("blocks.", "embedding.", "head."))
    assert answer["parameters"] == 1 + 2 * 9 + 2
    assert answer["loss"] == pytest.approx(answer["reference_loss"], rel=1e-12)
    assert (answer["steps"], answer["rows"]) == (2, 2)
    assert answer["shrunk"]["training.seq_len"] == {"from": 256, "to": 32}
    exact, lower = answer["precision"]["fp64"]["compared"], answer["precision"]["fp32"]["compared"]
    assert exact.keys() == lower.keys() >= {"gradient", "loss", "update", "held-out loss"}
    assert exact["update"]["worst"] < 1e-11 < lower["gradient"]["worst"] < lower["gradient"]["bound"] < 1e-5
    assert any("GPU" in each for each in answer["not_exercised"])


# Three ranks with two stages each, and all of ulysses, tensor ranks and spread experts.
@pytest.mark.parametrize("number", [197, 199])
def test_drawn_jobs_are_the_same(number: int) -> None:
    job, ranks = drawn(number, 0)
    verdict = verify(job, ranks)
    assert verdict.ok, verdict.sentence()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_more_drawn_jobs_are_the_same_in_their_precision(number: int) -> None:
    job, ranks = drawn(number, 1)
    verdict = verify(job, ranks, precision="job")
    assert verdict.ok, verdict.sentence()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU takes a C++ compiler")
@pytest.mark.parametrize(("ranks", "precision"), [(1, "bf16"), (2, "fp64")])
def test_a_compiled_job_is_verified_compiled(ranks: int, precision: str) -> None:
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    training = {"compile": True, "precision": precision}
    verdict = assert_same(Case("compiled", ranks, {"zero": 3}, training, spec=SPEC | {"layers": 2}), "job")
    if ranks == 1:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert not any("compile" in each for each in verdict.not_exercised)
