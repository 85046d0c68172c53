"""Muon's exchange: the plan, and that it is what live ranks do."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes.layout import Layout
from fivefold.axes.matrices import is_matrix, newton_schulz_flops
from fivefold.axes.muon import even_shares, number_in_stage, plan_of, update_messages
from fivefold.config import Job
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameters
from fivefold.replay.account import account
from tests.axes.layouts import SPECS
from tests.axes.test_account_splits import difference, third_step_on
from tests.cases import Case
from tests.ranks import on_ranks

EVEN = SPECS["dense"] | {"kv_heads": 4}


def job_of(spec: dict[str, Any], layout: dict[str, Any], states: str = "fp32", **training: Any) -> Job:
    ranks = 1
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
        ranks *= layout.get(axis, 1)
    full = {"dp_replicate": 1, "dp_shard": 1, "bucket_mb": 0.02} | layout
    training = {"micro_batch": 2, "global_batch": 16, "precision": "fp32"} | training
    return Case("muon", ranks, full, training, optimizer={"name": "muon", "states": states}, spec=spec).job()


# --- the plan ----------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, int]:
    degrees = {
        axis: draw(st.sampled_from([1, 2, 4])) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    }
    zero = draw(st.sampled_from([1, 2, 3])) if degrees["dp_shard"] * degrees["cp"] > 1 else 0
    zero = 0 if degrees["dp_shard"] == 1 and draw(st.booleans()) else zero
    return degrees | {"zero": zero}


@settings(max_examples=60, deadline=None)
@given(layouts(), st.sampled_from(["dense", "tied", "experts"]), st.data())
def test_every_matrix_has_one_owner_and_all_of_it_comes_there(
    layout: dict[str, int], model: str, data: st.DataObject
) -> None:
    spec, shards = SPECS[model], layout["dp_shard"] * layout["cp"]
    if model == "experts" and shards > 1:
        layout = layout | {"ep": data.draw(st.sampled_from([n for n in (1, 2, 4) if shards % n == 0]))}
    job = job_of(spec, layout, global_batch=256, micro_batch=1)
    seen = Counter[tuple[str, int]]()
    for stage in range(layout["pp"]):
        plan = plan_of(job, stage)
        assert plan == plan_of(job, stage)
        for matrix in plan.matrices:
            seen[matrix.key] += 1
            assert matrix.owner in matrix.shares.ranks
            cells = Counter[tuple[int, int]]()
            for block in matrix.shares.blocks:
                sender = plan.sender(matrix.owner, block)
                assert sender in block.holders
                assert (matrix.owner in block.holders) <= (sender == matrix.owner)
                near = {
                    rank for rank in block.holders if rank // plan.replica == matrix.owner // plan.replica
                }
                assert sender in near or not near
                (row, column), (rows, columns) = block.start, block.shape
                cells.update((row + r, column + c) for r in range(rows) for c in range(columns))
            whole = {(r, c) for r in range(matrix.shape[0]) for c in range(matrix.shape[1])}
            assert cells == Counter(whole), "each number comes once"
    wanted = Counter[tuple[str, int]]()
    for p in parameters(job.spec):
        if is_matrix(job.spec, p.name, p.shape):
            wanted.update((p.name, n) for n in range(p.shape[0] if len(p.shape) == 3 else 1))
    assert seen == wanted


@pytest.mark.parametrize("layout", [{"dp_shard": 4, "zero": 3}, {"dp_replicate": 2, "tp": 2, "zero": 0}])
def test_owners_have_even_work_in_every_round(layout: dict[str, int]) -> None:
    spec = SPECS["dense"] | {"layers": 24}
    plan = plan_of(job_of(spec, layout), 0)
    costs = [Counter[int]() for _ in plan.rounds]
    for number, matrices in enumerate(plan.rounds):
        for matrix in matrices:
            costs[number][matrix.owner] += matrix.cost
    costliest = max(matrix.cost for matrix in plan.matrices)
    totals = [sum(cost[rank] for cost in costs) for rank in range(plan.ranks)]
    assert max(totals) - min(totals) <= costliest
    assert len(plan.rounds) == 4
    for cost in costs:
        assert max(cost.values()) <= max(totals) / 4 + costliest


def test_flops_are_those_of_the_products() -> None:
    """2 x rows x inner x columns of each: [4, 6] [6, 4], its square, and [4, 4] [4, 6], in 5 steps."""
    flops = 5 * 2 * (4 * 6 * 4 + 4 * 4 * 4 + 4 * 4 * 6)
    assert newton_schulz_flops(4, 6) == newton_schulz_flops(6, 4) == flops


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("even", {"dp_replicate": 4, "zero": 0}),
        ("even", {"dp_shard": 4, "zero": 2}),
        ("even", {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "zero": 3}),
        ("even", {"tp": 4, "pp": 2, "cp": 2, "zero": 0}),
        ("experts", {"dp_shard": 4, "ep": 2, "zero": 3}),
        ("experts", {"dp_shard": 4, "ep": 4, "zero": 1, "dp_replicate": 2}),
        ("experts", {"dp_shard": 2, "zero": 3}),
        ("experts", {"cp": 4, "ep": 2, "zero": 0}),
        ("experts", {"dp_shard": 8, "ep": 2, "zero": 3}),
    ],
)
def test_even_shares_are_the_mean_of_what_ranks_send(model: str, layout: dict[str, Any]) -> None:
    job = job_of(EVEN if model == "even" else SPECS[model] | {"kv_heads": 4}, layout)
    plan = plan_of(job, 0)
    sent = [plan.sent(turn, rank) for turn in range(len(plan.rounds)) for rank in range(plan.ranks)]
    layers = len({matrix.key[0].split(".")[1] for matrix in plan.matrices})
    means = tuple(sum(column) / plan.ranks for column in zip(*sent, strict=True))
    assert means == pytest.approx(even_shares(Setup.of(job), layers))


# --- live ranks --------------------------------------------------------------------------------------------

LIVE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense", {"dp_replicate": 2, "zero": 0}, {}),
    ("tied", {"dp_shard": 2, "zero": 3}, {"precision": "bf16"}),
    ("dense", {"tp": 2}, {"precision": "fp64"}),
    ("experts", {"dp_shard": 2, "ep": 2, "zero": 2}, {"routing": "balanced"}),
    ("dense", {"pp": 2}, {}),
    ("tied", {"dp_shard": 2, "zero": 3}, {"states": "bf16"}),
    ("experts", {"dp_shard": 2, "zero": 1}, {"states": "int8", "routing": "balanced", "precision": "bf16"}),
    ("dense", {"dp_replicate": 2, "dp_shard": 2, "zero": 1}, {}),
    ("dense", {"dp_shard": 2, "tp": 2, "zero": 3}, {}),
    ("tied", {"dp_shard": 2, "pp": 2, "zero": 3}, {"precision": "fp16"}),
    ("one key", {"dp_replicate": 2, "tp": 2, "zero": 0}, {}),
    ("dense", {"cp": 2, "dp_shard": 2, "zero": 2}, {}),
    ("experts", {"dp_shard": 2, "zero": 3}, {}),
    ("dense", {}, {}),
]
NAMES = {
    " ".join([model, *(f"{k}={v}" for k, v in {**a, **b}.items())]): (model, a, b) for model, a, b in LIVE
}


def live_job(name: str) -> Job:
    model, layout, training = NAMES[name]
    return job_of(SPECS[model], layout, **training)


@cache
def live(name: str) -> list[dict[str, Any]]:
    return on_ranks(third_step_on, Layout.of(live_job(name)).ranks, live_job(name))


def cases() -> list[Any]:
    """Of those on four ranks `make test` runs one."""
    large = [name for name in NAMES if Layout.of(live_job(name)).ranks > 2]
    return [pytest.param(n, marks=[pytest.mark.slow] if n in large[1:] else []) for n in NAMES]


@pytest.mark.parametrize("name", cases())
def test_messages_of_a_steady_step(name: str) -> None:
    for found in live(name):
        job, place = live_job(name), found["place"]
        expected = account(job, place).traffic()
        assert found["traffic"] == expected, difference(found["traffic"], expected)


@pytest.mark.parametrize("name", cases())
def test_bytes_of_the_optimizer(name: str) -> None:
    for found in live(name):
        assert account(live_job(name), found["place"]).rest("states") == found["states"]


def test_what_is_sent_in_a_small_layout() -> None:
    """Two replicas hold everything: nothing travels to owners, and all that one does not own comes to it."""
    job = job_of(EVEN, {"dp_replicate": 2, "zero": 0})
    layout = Layout.of(job)
    every = [list(update_messages(job, layout.place(rank))) for rank in range(2)]
    elements = sum(p.count for p in parameters(job.spec) if is_matrix(job.spec, p.name, p.shape))
    assert sum(m.payload * m.count for mine in every for m in mine) == 2 * elements
    assert all(m.count == 0 or m.wire_bytes == m.payload for mine in every for m in mine)
    assert [number_in_stage(layout, layout.place(rank)) for rank in range(2)] == [0, 1]
