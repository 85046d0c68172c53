"""Weights gathered in 8 bits on a GPU: FSDP casts on one stream, gathers on another, computes on a third."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from fivefold.axes.runtime.fp8_gather import GatheredWeight
from fivefold.axes.runtime.fp8_numbers import E4M3, cast
from fivefold.axes.runtime.fp8_product import weight_rows
from fivefold.axes.runtime.fp8_split import products
from fivefold.config import Job
from fivefold.training.build import build
from tests.axes.test_fp8_split import WIDE, case
from tests.traced import fake_world, one_backward

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with fp8"
)


def wrong_rows(job: Job, device: str) -> dict[str, int]:
    """Of two ranks the first, whose own rows come to it over a group that sends nothing.

    By layer, in how many numbers these differ from a cast of its shard; weights change from step to step.
    """
    found: dict[str, int] = {}
    with fake_world(2, 0):
        built = build(job, torch.device(device))
        masters = dict(zip(built.weights.names, built.weights.masters, strict=True))

        def look(product: Any, given: Any) -> None:
            assert isinstance(given[1], GatheredWeight)
            own = masters[f"{product.name}.weight"]
            expected = cast(own.bfloat16(), product.weight_scale, E4M3).values.view(torch.uint8)
            numbers = weight_rows(given[1], product.weight_scale, None).values.view(torch.uint8)
            differ = int((numbers[: len(own)] != expected).sum())
            found[product.name] = found.get(product.name, 0) + differ

        for product in products(built.parts):
            product.register_forward_pre_hook(look)
        for _ in range(3):
            one_backward(built)
            for master in masters.values():
                master.detach().mul_(1.7)
            built.weights.publish()
    return found


@pytest.mark.parametrize("zero", [1, 3])
def test_a_rank_computes_with_what_it_cast(zero: int) -> None:
    training = {"fp8": "tensorwise", "fp8_head": True}
    job = case("on a GPU", 2, {"dp_shard": 2, "zero": zero}, training, WIDE).job()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(wrong_rows, (job, "cuda"))
    assert len(found) == 7 * WIDE["layers"] + 1
    assert not any(found.values())
