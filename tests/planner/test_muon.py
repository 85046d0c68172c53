"""What Muon costs, by the planner: of many layouts as of each, states, and where the time comes from."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fivefold.axes.layout import Place
from fivefold.axes.matrices import newton_schulz_flops
from fivefold.axes.muon import even_bytes, even_shares, exchange_bytes, plan_of
from fivefold.axes.pieces import part_sizes
from fivefold.config import Job, resolve
from fivefold.hardware.cluster import find_cluster
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.planner.memory.our_tensors import rank_tensors, states
from fivefold.planner.placement import most_layers, ours
from fivefold.planner.time.constants import Constants, peak
from fivefold.planner.time.muon import busiest_owner_time, orthogonalisation_time
from fivefold.planner.time.parts import Costs
from fivefold.planner.time.stack import OURS
from fivefold.planner.time.state import optimizer_time
from fivefold.replay.account import account
from tests.planner.test_plan import SMALL, request

H100 = find_cluster("dgx-h100")


def costs_of(model: str = "llama3.2-1b", **changes: Any) -> Costs:
    base = Setup(PRESETS[model], 4096, 512, PRECISIONS["bf16"], optimizer="muon", momentum=0.95)
    return Costs.of(replace(base, **changes), H100, OURS, Constants(matmul=0.65))


def test_one_process_takes_as_long_as_its_products() -> None:
    costs = costs_of()
    job = Job.model_validate({"model": {"preset": "llama3.2-1b"}, "optimizer": {"name": "muon"}})
    flops = sum(matrix.cost for matrix in plan_of(resolve(job, 1), 0).matrices)
    taken, device = float(orthogonalisation_time(costs)), costs.cluster.device
    assert flops / peak(device, "bfloat16") < taken < 3 * flops / peak(device, "bfloat16")
    adamw = replace(costs.setup, optimizer="adamw")
    others = float(optimizer_time(costs)) - taken
    assert 1 < others / float(optimizer_time(replace(costs, setup=adamw))) < 2.5


def test_owners_share_the_work_and_wait_for_slow_messages() -> None:
    alone = float(orthogonalisation_time(costs_of()))
    shared = float(orthogonalisation_time(costs_of(dp_shard=8, zero=3)))
    assert alone / 8 < shared < alone / 4
    far = costs_of(dp_shard=64, zero=3)
    assert float(orthogonalisation_time(far)) > alone / 64
    slow = replace(far.cluster, levels=tuple(replace(each, bandwidth=1e8) for each in far.cluster.levels))
    waited = float(orthogonalisation_time(replace(far, cluster=slow)))
    assert waited > alone
    assert waited > 0.9 * 2 * float(sum(even_shares(far.setup, far.most_layers))) / 1e8


def test_the_costliest_matrix_is_somebodys() -> None:
    """However many ranks there are."""
    many = float(busiest_owner_time(costs_of("llama3-8b", dp_replicate=4096)))
    flops = newton_schulz_flops(4096, 14336)
    assert many > flops / peak(H100.device, "bfloat16")


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_many_layouts_are_as_each_of_them(model: str) -> None:
    degrees: dict[str, Any] = {
        "dp_shard": np.array([8, 4, 2, 8]),
        "tp": np.array([1, 2, 4, 1]),
        "pp": np.array([1, 1, 2, 4]),
        "dp_replicate": np.array([1, 2, 1, 2]),
    }
    if model == "mixtral-8x7b":
        degrees["ep"] = np.array([8, 2, 2, 1])
    settings: dict[str, Any] = {"zero": 2, "schedule": "1f1b"}
    every = optimizer_time(costs_of(model, **degrees, **settings))
    for row, found in enumerate(np.asarray(every)):
        one = {name: int(values[row]) for name, values in degrees.items()}
        assert found == pytest.approx(float(optimizer_time(costs_of(model, **one, **settings))))


@pytest.mark.parametrize(("kept", "spared"), [("fp32", 4), ("bf16", 2), ("int8", 0)])
@pytest.mark.parametrize("layout", [{}, {"dp_shard": 8, "zero": 3}, {"dp_shard": 4, "tp": 2, "zero": 1}])
def test_states_are_those_of_the_ledger(layout: dict[str, Any], kept: str, spared: int) -> None:
    sections = {
        "model": {"preset": "llama3.2-1b"},
        "optimizer": {"name": "muon", "ema": 0.9, "states": kept},
        "training": {"precision": "bf16"},
        "layout": {"dp_shard": 1} | layout,
    }
    job = resolve(Job.model_validate(sections), layout.get("dp_shard", 1) * layout.get("tp", 1))
    setup = Setup.of(job)
    parts = part_sizes(setup)
    held = parts["block"].times(job.spec.layers) + parts["embedding"] + parts["head"]
    assert states(setup, held) == account(job).rest("states")
    plain = replace(setup, optimizer="adamw")
    counters = 4 * held.matrix_tensors * (kept == "fp32")  # where momentum is rounded there are as many
    assert states(plain, held) - states(setup, held) == spared * held.matrices + counters


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"dp_replicate": 8, "zero": 0},
        {"dp_shard": 8, "zero": 3},
        {"dp_shard": 4, "tp": 2, "zero": 1},
        {"pp": 2, "dp_shard": 4, "zero": 2},
    ],
)
def test_buffers_are_about_those_of_the_ledger(layout: dict[str, Any]) -> None:
    """Whole matrices do not fall evenly: within a half."""
    sections = {
        "model": {"preset": "llama3.2-1b"},
        "optimizer": {"name": "muon"},
        "training": {"precision": "bf16"},
        "layout": {"dp_shard": 1} | layout,
    }
    job = resolve(Job.model_validate(sections), math.prod(v for k, v in layout.items() if k != "zero"))
    setup = Setup.of(job)
    found = float(even_bytes(setup, int(most_layers(setup, ours))))
    assert exchange_bytes(job, Place()) == pytest.approx(found, rel=0.5)
    assert even_bytes(replace(setup, optimizer="adamw"), 16) == 0
    # At the fullest moment of one short sequence.
    short = replace(setup, seq_len=8, global_batch=8, micro_batch=1)
    more, plain = (rank_tensors(replace(short, optimizer=name), 0) for name in ("muon", "adamw"))
    fullest = [float(each.allocated - each.states) for each in (more, plain)]
    assert fullest[0] >= fullest[1]
    whole = 0.0 if setup.zero else float(more.weights)
    assert fullest[0] >= float(more.gradients) + whole + found


def test_a_plan_is_of_the_job_that_would_run() -> None:
    asked = request(**SMALL, keys={"optimizer.name": "muon"})
    found = asked.answer()
    planned = found.searched.best[0]
    assert (planned.setup.optimizer, planned.setup.momentum) == ("muon", 0.95)
    assert Setup.of(resolve(asked.job(found), 4)) == planned.setup
