"""What `plan` says hangs together: its best, its front, `--compile`, `--why`, and `simulate` of its job."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan_agrees import ALLOWED, excesses, request
from fivefold.hardware.cluster import write_cluster
from fivefold.planner.request import Request
from tests.planner.test_step_time import slow

SMALL_EXPERTS = {"model.experts": 4, "model.experts_per_token": 2, "model.layers": 4, "training.seq_len": 512}


def assert_agrees(asking: Request) -> None:
    found = dict(excesses(asking))
    assert found.keys() == ALLOWED.keys()
    assert {what: excess for what, excess in found.items() if excess > ALLOWED[what]} == {}


@pytest.mark.parametrize("gpus", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_plan_agrees_with_itself(gpus: int) -> None:
    assert_agrees(request("llama3-8b", gpus))


def test_a_plan_of_experts_on_slow_links_agrees_with_itself(tmp_path: Path) -> None:
    """Which are worth a pipeline, whose weights and gradients take turns with compute."""
    path = str(tmp_path / "cluster.toml")
    write_cluster(slow("dgx-h100"), path)
    assert_agrees(
        Request(model="llama3.2-1b", hf=None, cluster=path, gpus=2, global_batch=4, keys=SMALL_EXPERTS)
    )
