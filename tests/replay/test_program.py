"""The plan is the program, for memory and FLOPs: a traced step holds and does what is replayed for it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fivefold.axes.layout import Layout
from fivefold.config import dump_toml, load, resolve
from fivefold.planner.request import Request
from fivefold.replay.account import account, replayed
from tests.axes.layouts import MOE
from tests.cases import SPEC, TIED, Case
from tests.traced import Traced, traced

SMALL = 200
"""Bytes of scalars that are not replayed."""
EXACT, EXPERTS, HALVES, FIRST = 0.002, 0.02, 0.06, 0.02
"""How far the peak may be off: for rounding and scalars; for expert layers; where backward goes in halves;
of a first forward pass, under FSDP.
"""

QK = SPEC | {"qk_norm": True, "parallel_block": True}
SPECS = {"llama": SPEC, "gpt2": TIED, "experts": MOE, "qk": QK}
SPLIT_BACKWARD = ("zero-bubble", "zbv", "dualpipev")


def cases() -> dict[str, tuple[Case, int]]:
    """Every axis, ZeRO stage, recompute mode and schedule; both precisions; composed layouts."""
    found: list[tuple[str, dict[str, Any], dict[str, Any], int]] = []
    for model in ("llama", "gpt2", "qk", "experts"):
        for mode in ("none", "full", "every-2", "sqrt", "selective"):
            found.append((model, {}, {"recompute": mode}, 0))
    for model in ("llama", "gpt2"):
        for zero in (1, 2, 3):
            found.append((model, {"dp_shard": 2, "zero": zero}, {}, 0))
            found.append((model, {"dp_replicate": 2, "dp_shard": 2, "zero": zero}, {"micro_batch": 1}, 1))
        found.append((model, {"dp_replicate": 2}, {}, 0))
        for mode in ("full", "every-2", "selective"):
            found.append((model, {"dp_shard": 2, "zero": 3}, {"recompute": mode}, 0))
            found.append((model, {"tp": 2}, {"recompute": mode}, 0))
        found.append((model, {"tp": 2}, {}, 0))
        found.append((model, {"tp": 4}, {"micro_batch": 1}, 0))
        found.append((model, {"tp": 2, "sequence_parallel": False}, {}, 0))
        for kind in ("ring", "allgather", "ulysses"):
            found.append((model, {"cp": 2, "cp_kind": kind}, {}, 0))
            found.append((model, {"cp": 4, "cp_kind": kind}, {"recompute": "full"}, 1))
        found.append((model, {"cp": 2, "cp_kind": "ring"}, {"recompute": "selective"}, 1))
        for schedule in ("naive", "gpipe", "1f1b", "interleaved", "looped-bfs", *SPLIT_BACKWARD):
            for rank in (0, 1):
                found.append((model, {"pp": 2, "schedule": schedule}, {"micro_batch": 1}, rank))
        found.append((model, {"pp": 2, "schedule": "zbv"}, {"micro_batch": 1, "recompute": "full"}, 0))
        found.append((model, {"dp_shard": 2, "tp": 2, "zero": 3}, {"recompute": "full"}, 0))
        found.append((model, {"dp_shard": 2, "cp": 2, "zero": 3}, {}, 0))
        found.append((model, {"cp": 2, "tp": 2, "cp_kind": "ulysses"}, {}, 0))
        found.append((model, {"pp": 2, "dp_shard": 2, "zero": 2}, {"micro_batch": 1}, 0))
        found.append((model, {"pp": 2, "dp_shard": 2, "zero": 3}, {"micro_batch": 1}, 0))
        for rank in (0, 2):
            several = {"pp": 2, "dp_shard": 2, "zero": 1, "schedule": "interleaved"}
            found.append((model, several, {"micro_batch": 1}, rank))
        found.append((model, {"pp": 2, "tp": 2}, {"micro_batch": 1, "recompute": "full"}, 2))
    for zero in (1, 3):
        found.append(("experts", {"dp_shard": 2, "ep": 2, "zero": zero}, {}, 0))
        found.append(("experts", {"dp_shard": 4, "ep": 2, "zero": zero}, {"recompute": "full"}, 0))
    found.append(("experts", {"tp": 2}, {}, 0))
    found.append(("experts", {"cp": 2, "ep": 2}, {}, 0))
    found.append(("experts", {"pp": 2}, {"micro_batch": 1}, 1))
    named = {}
    for precision in ("bf16", "fp32"):
        for model, layout, training, rank in found:
            words = " ".join(f"{k}={v}" for k, v in {**layout, **training}.items() if v != "none")
            name = f"{precision} {model}: {words or 'one process'}, rank {rank}"
            named[name] = _case(name, model, layout, training | {"precision": precision}), rank
    return named


def _case(name: str, model: str, layout: dict[str, Any], training: dict[str, Any]) -> Case:
    ranks = 1
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
        ranks *= layout.get(axis, 1)
    full = {"dp_replicate": 1, "dp_shard": 1, "bucket_mb": 0.02} | layout
    training = {"micro_batch": 2, "global_batch": 16} | training
    if model == "experts":
        training["routing"] = "balanced"
    return Case(name, ranks, full, training, spec=SPECS[model])


CASES = cases()
FAST = (
    "bf16 llama: recompute=selective, rank 0",
    "fp32 gpt2: one process, rank 0",
    "bf16 llama: dp_shard=2 zero=3 recompute=every-2, rank 0",
    "bf16 gpt2: tp=2, rank 0",
    "bf16 llama: cp=2 cp_kind=ring, rank 0",
    "fp32 llama: pp=2 schedule=1f1b micro_batch=1, rank 0",
    "fp32 llama: pp=2 dp_shard=2 zero=1 schedule=interleaved micro_batch=1, rank 2",
    "bf16 experts: dp_shard=2 ep=2 zero=1, rank 0",
)


@cache
def trace(name: str) -> Traced:
    case, rank = CASES[name]
    return traced(case.job(), rank)


every_case = pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)


@every_case
def test_tensors_of_a_step(name: str) -> None:
    case, rank = CASES[name]
    job = case.job()
    played, found = replayed(job, Layout.of(job).place(rank), "cpu"), trace(name)
    assert played.rest == found.rest
    off = EXPERTS if job.spec.experts is not None else EXACT
    if job.layout.schedule in SPLIT_BACKWARD and job.training.recompute == "none":
        off = HALVES
    assert played.peak == pytest.approx(found.peak, rel=off)
    if job.layout.pp == 1:
        assert played.first == pytest.approx(found.first, rel=FIRST if job.layout.zero else 0, abs=SMALL)


@every_case
def test_saved_for_backward(name: str) -> None:
    case, rank = CASES[name]
    job = case.job()
    if job.layout.pp > 1:
        pytest.skip("a pipeline's first forward pass is one stage's")
    played, found = replayed(job, Layout.of(job).place(rank), "cpu").saved, trace(name)
    assert played == found.saved
    if job.training.recompute == "none" and job.spec.experts is None and job.layout.zero != 3:
        # Recomputation and expert layers keep tensors past autograd's books; gathered weights are in them.
        assert found.kept == found.saved


@every_case
def test_flops(name: str) -> None:
    case, rank = CASES[name]
    job = case.job()
    assert int(account(job, Layout.of(job).place(rank)).flops) == trace(name).flops


def test_the_fast_cases_exist() -> None:
    assert set(FAST) <= set(CASES)


def test_a_planned_job_holds_what_was_planned(tmp_path: Path) -> None:
    """Within 3%, with documents apart as the job has them: on a CPU that takes a mask, not replayed."""
    asked = Request(model="tiny", hf=None, cluster="laptop", gpus="4", seq_len=256, global_batch=32)
    found = asked.answer()
    assert found.best is not None
    (tmp_path / "job.toml").write_text(dump_toml(asked.job(found)))
    job = resolve(load(str(tmp_path / "job.toml")), 4)
    assert job.data.separate_documents
    peak = traced(job, documents=3).peak
    assert replayed(job, device="cpu").peak == pytest.approx(peak, rel=0.03)
    assert found.row(found.best)["memory_gib"] * 2**30 == pytest.approx(peak, rel=0.03)
