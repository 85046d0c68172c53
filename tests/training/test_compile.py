"""Compiled blocks compute what plain ones do."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.training.ranks import run_ranks
from fivefold.verification import gradient_error
from tests.cases import SPEC, Case, gradients

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU takes a C++ compiler"),
]

SMALL: dict[str, Any] = SPEC | {"layers": 2}


def both_ways(world: World, plain: Job, compiled: Job) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Gradients of plain and compiled blocks, and how many graphs were compiled."""
    expected = gradients(plain)
    torch._dynamo.reset()  # or graphs of an earlier case would serve again
    torch._dynamo.utils.counters.clear()
    return expected, gradients(compiled), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("ranks", "layout", "more"),
    [
        (1, {}, {}),
        (1, {}, {"recompute": "full"}),
        (1, {}, {"loss_chunk": 12}),
        (2, {"zero": 3}, {}),
        (2, {"zero": 0}, {"recompute": "selective"}),
        (2, {"zero": 3}, {"loss_chunk": 12}),
        (2, {"tp": 2, "dp_shard": 1}, {"loss_chunk": 12}),
    ],
)
def test_gradients_are_those_of_plain_blocks(
    ranks: int, layout: dict[str, Any], more: dict[str, Any]
) -> None:
    training = {"micro_batch": 2} | more
    plain = Case("plain", ranks, layout, training, spec=SMALL).job()
    compiled = Case("compiled", ranks, layout, training | {"compile": True}, spec=SMALL).job()
    for rank, (expected, found, graphs) in enumerate(run_ranks(both_ways, ranks, plain, compiled)):
        assert graphs > 0, "nothing was compiled"
        if rank > 0:
            continue  # whole gradients are put together on the first rank
        error, parameter = gradient_error(found["gradients"], expected["gradients"])
        assert error <= 1e-10, parameter
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-12)
