"""The plan is the program, for every axis: what live ranks send in a steady step is what the ledger says."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

from fivefold.config import Job
from fivefold.replay.account import account
from tests.axes.layouts import SPECS
from tests.axes.test_account import storage_bytes
from tests.cases import Case, batches, built_on_cpu, log_received
from tests.ranks import on_ranks
from tests.tracer import MessageTracer


def cases() -> dict[str, Case]:
    """Every axis alone, and composed layouts; recomputation, precision and accumulation here and there."""
    found: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("dense", {"tp": 2}, {}),
        ("tied", {"tp": 2}, {"precision": "bf16"}),
        ("tied", {"tp": 2, "sequence_parallel": False}, {}),
        ("dense", {"tp": 2}, {"recompute": "full"}),
        ("dense", {"tp": 2}, {"recompute": "every-3"}),
        ("dense", {"tp": 2}, {"recompute": "selective"}),
        ("gemma", {"tp": 2}, {"recompute": "full"}),
        ("dense", {"tp": 2}, {"loss_chunk": 12}),
        ("tied", {"tp": 2, "sequence_parallel": False}, {"loss_chunk": 16}),
        ("dense", {"tp": 2}, {"loss_chunk": 100}),
        ("dense", {"cp": 2, "tp": 2, "zero": 1}, {"loss_chunk": 5, "precision": "bf16"}),
        ("gemma", {"cp": 2, "cp_kind": "ulysses"}, {"recompute": "selective"}),
        ("dense", {"pp": 2}, {}),
        ("tied", {"pp": 2}, {"precision": "bf16"}),
        ("dense", {"pp": 2, "schedule": "naive"}, {}),
        ("dense", {"pp": 2, "schedule": "gpipe"}, {}),
        ("dense", {"pp": 2, "schedule": "interleaved"}, {}),
        ("dense", {"pp": 2, "schedule": "zero-bubble"}, {}),
        ("tied", {"pp": 2, "schedule": "zbv"}, {}),
        ("dense", {"pp": 2, "schedule": "dualpipev"}, {}),
        ("dense", {"cp": 2, "cp_kind": "ring"}, {}),
        ("dense", {"cp": 2, "cp_kind": "ring"}, {"recompute": "full"}),
        ("dense", {"cp": 2, "cp_kind": "ring"}, {"recompute": "selective"}),
        ("tied", {"cp": 2, "cp_kind": "ulysses"}, {"precision": "bf16"}),
        ("dense", {"cp": 2, "cp_kind": "ulysses"}, {"recompute": "selective"}),
        ("dense", {"cp": 2, "cp_kind": "allgather"}, {"recompute": "every-2"}),
        ("dense", {"cp": 2, "zero": 3}, {}),
        ("experts", {"dp_shard": 2, "ep": 2, "zero": 3}, {"routing": "balanced"}),
        ("experts", {"dp_shard": 2, "ep": 2, "zero": 2}, {"routing": "balanced", "recompute": "full"}),
        ("experts", {"cp": 2, "ep": 2, "zero": 0}, {"routing": "balanced"}),
        ("experts", {"tp": 2}, {}),
        ("experts", {"dp_shard": 2, "ep": 2, "zero": 3}, {"routing": "learned"}),
        ("dense", {"dp_shard": 2, "tp": 2, "zero": 3}, {"recompute": "full"}),
        ("tied", {"pp": 2, "tp": 2}, {}),
        ("tied", {"dp_replicate": 2, "cp": 2, "zero": 0}, {}),
        ("dense", {"pp": 2, "dp_shard": 2, "zero": 3}, {}),
        ("dense", {"pp": 2, "dp_shard": 2, "zero": 2, "schedule": "zbv"}, {"precision": "bf16"}),
        ("dense", {"cp": 2, "tp": 2, "zero": 1}, {}),
        ("experts", {"dp_shard": 4, "ep": 2, "zero": 3}, {"routing": "balanced"}),
        ("experts", {"dp_shard": 2, "tp": 2, "ep": 2, "zero": 3}, {"routing": "balanced"}),
        (
            "experts",
            {"dp_shard": 2, "pp": 2, "ep": 2, "zero": 3},
            {"routing": "learned", "recompute": "full"},
        ),
    ]
    named = {}
    for model, layout, training in found:
        ranks = 1
        for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
            ranks *= layout.get(axis, 1)
        words = " ".join(f"{k}={v}" for k, v in {**layout, **training}.items())
        name = f"{model}: {words}"
        full = {"dp_replicate": 1, "dp_shard": 1, "bucket_mb": 0.02} | layout
        training = {"micro_batch": 2, "global_batch": 8, "precision": "fp32"} | training
        named[name] = Case(name, ranks, full, training, spec=SPECS[model])
    return named


CASES = cases()


def third_step(job: Job) -> dict[str, Any]:
    """What this rank sends in its third step, and holds after it."""
    built = built_on_cpu(job)
    tracer = MessageTracer(built.mesh)
    with batches(job, built) as loader:
        for step in (1, 2):
            built.step(next(loader), 1e-3, step)
        received: dict[int, list[int]] = {}
        if job.spec.experts is not None:
            for part in built.parts:
                received |= log_received(part)
        with tracer:
            built.step(next(loader), 1e-3, 3)
    kept = storage_bytes(built.optimizer.tensors())
    if built.weights.sharded or built.weights.copied:
        kept += storage_bytes(built.weights.masters)
    return {"traffic": tracer.traffic(), "states": kept, "place": built.mesh.place, "received": received}


def third_step_on(world: Any, job: Job) -> dict[str, Any]:
    return third_step(job)


@cache
def live(name: str) -> list[dict[str, Any]]:
    return on_ranks(third_step_on, CASES[name].ranks, CASES[name].job())


def difference(found: Counter[Any], expected: Counter[Any]) -> str:
    more, less = found - expected, expected - found
    return "\n".join([f"sent, not in the ledger: {more}", f"in the ledger, not sent: {less}"])


@pytest.mark.parametrize("name", CASES)
def test_messages_of_a_steady_step(name: str) -> None:
    for found in live(name):
        job, place = CASES[name].job(), found["place"]
        # What learned routing will send where is not known beforehand.
        learned = job.training.routing == "learned"
        expected = account(job, place, found["received"] if learned else None).traffic()
        assert found["traffic"] == expected, difference(found["traffic"], expected)


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_the_optimizer(name: str) -> None:
    for found in live(name):
        assert account(CASES[name].job(), found["place"]).rest("states") == found["states"]
