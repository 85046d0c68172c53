"""Experts in 8 bits under every axis: their messages, their scales, and gradients against one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fivefold.axes import fp8
from fivefold.axes.runtime.fp8_grouped import GroupedProduct
from fivefold.axes.runtime.fp8_split import products
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.ledger.setup import Setup
from fivefold.replay.account import account
from tests.axes.test_fp8_split import EXPERTS, ROUNDINGS, case, live, rms_error
from tests.cases import batches, built_on_cpu, log_received
from tests.ranks import on_ranks
from tests.tracer import MessageTracer

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, {}),
    "replicas": (2, {"dp_replicate": 2, "zero": 0}, {}),
    "zero 3": (2, {"dp_shard": 2, "zero": 3}, {}),
    "zero 3, full": (2, {"dp_shard": 2, "zero": 3}, {"recompute": "full"}),
    "selective": (1, {}, {"recompute": "selective"}),
    "pp, zero-bubble": (2, {"pp": 2, "schedule": "zero-bubble"}, {}),
    "tp": (2, {"tp": 2}, {}),
    "tp, full": (2, {"tp": 2}, {"recompute": "full"}),
    "ep": (2, {"dp_shard": 2, "ep": 2, "zero": 1}, {}),
    "ep, zero 3": (2, {"dp_shard": 2, "ep": 2, "zero": 3}, {}),
    "ep, zero 1 x zero-bubble": (
        4,
        {"dp_shard": 2, "ep": 2, "zero": 1, "pp": 2, "schedule": "zero-bubble"},
        {},
    ),
    "ep x tp": (4, {"dp_shard": 2, "ep": 2, "tp": 2, "zero": 1}, {}),
    "cp and ep": (2, {"cp": 2, "ep": 2}, {"seq_len": 32}),
}


def spec_of(name: str) -> dict[str, Any]:
    """A block for each of a zero-bubble schedule's stages."""
    return EXPERTS | {"layers": 4 if "zero-bubble" in name else 2}


CASES = {
    f"{name}: {scales}": case(name, ranks, layout, {"fp8": scales, **training}, spec_of(name))
    for scales in ("tensorwise", "rowwise")
    for name, (ranks, layout, training) in LAYOUTS.items()
}
QUICK = ("one process", "zero 3", "tp", "ep")
STACKS = [f"blocks.{n}.mlp.experts.{one}" for n in range(2) for one in ("gate", "up", "down")]


def marked(*names: str) -> list[Any]:
    """Cases by layout, with both kinds of scales; some of them slow."""
    return [
        title if name in QUICK else pytest.param(title, marks=pytest.mark.slow)
        for name in names
        for title in (f"{name}: tensorwise", f"{name}: rowwise")
    ]


@cache
def ranks_of(name: str) -> list[dict[str, Any]]:
    return on_ranks(live, CASES[name].ranks, CASES[name].job())


# --- messages and scales -----------------------------------------------------------------------------------


def a_step(world: World, job: Job) -> dict[str, Any]:
    """What a rank sends in its second step, and how many tokens came to its experts."""
    built = built_on_cpu(job)
    tracer = MessageTracer(built.mesh)
    with batches(job, built) as loader:
        built.step(next(loader), 1e-3, 1)
        received = {layer: log for part in built.parts for layer, log in log_received(part).items()}
        with tracer:
            built.step(next(loader), 1e-3, 2)
    return {"traffic": tracer.traffic(), "place": built.mesh.place, "received": received}


@pytest.mark.parametrize(
    "name", marked("zero 3", "tp", "tp, full", "ep", "ep, zero 3", "ep x tp", "cp and ep")
)
def test_messages_are_the_ledgers(name: str) -> None:
    """Rowwise, as many bytes as rows came: under learned routing other ones in every micro-batch."""
    for found in on_ranks(a_step, CASES[name].ranks, CASES[name].job()):
        assert found["traffic"] == account(CASES[name].job(), found["place"], found["received"]).traffic()


@pytest.mark.parametrize("name", marked(*LAYOUTS))
def test_stacks_take_part_and_their_scales_are_equal_everywhere(name: str) -> None:
    """One for a whole stack, whichever experts a rank has."""
    names = fp8.weights(Setup.of(CASES[name].job()))
    assert {f"{stack}.weight" for stack in STACKS} <= set(names)
    every = ranks_of(name)
    if name.endswith("tensorwise"):
        masters = every[0]["masters"]
        most = torch.stack([masters[name].abs().max() for name in names]).bfloat16().double()
        for found in every:
            scales = found["scales"].double()
            assert ((most * scales <= 448) & (most * scales > 224)).all()


@pytest.mark.parametrize("name", marked("tp", "tp, full"))
def test_scales_of_rows_and_gradients_are_equal_on_tp_ranks(name: str) -> None:
    first, other = ([(dtype, scale) for dtype, scale, _ in found["casts"]] for found in ranks_of(name))
    assert other == first


# --- gradients ---------------------------------------------------------------------------------------------


def alone_as(name: str) -> dict[str, Any]:
    """What one process makes of the same step."""
    training = {key: value for key, value in CASES[name].training.items() if key != "recompute"}
    found: dict[str, Any] = on_ranks(live, 1, case("alone", 1, {}, training, CASES[name].spec).job())[0]
    return found


@pytest.mark.parametrize("name", marked("replicas", "zero 3", "zero 3, full", "selective", "pp, zero-bubble"))
def test_gradients_are_one_processs_where_only_sums_over_micro_batches_differ(name: str) -> None:
    """Those sums are in float32."""
    alone, found = alone_as(name), ranks_of(name)[0]
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert rms_error(found["gradients"], alone["gradients"]) < 2e-6


@pytest.mark.parametrize(
    "name",
    marked("tp", "tp, full", "ep", "ep, zero 3", "ep, zero 1 x zero-bubble", "ep x tp", "cp and ep"),
)
def test_gradients_are_as_near_one_processs_as_rounding_allows(name: str) -> None:
    alone, found = alone_as(name), ranks_of(name)[0]
    assert found["loss"] == pytest.approx(alone["loss"], rel=2.0**-8)
    assert rms_error(found["gradients"], alone["gradients"]) < ROUNDINGS


def test_products_are_of_experts_and_of_layers() -> None:
    built = built_on_cpu(CASES["one process: tensorwise"].job())
    kinds = {product.name: type(product) for product in products(built.parts)}
    assert [name for name, kind in kinds.items() if kind is GroupedProduct] == STACKS
    assert "blocks.0.mlp.shared.down" in kinds
    assert not any("router" in name for name in kinds)


def test_stacks_are_gathered_in_bfloat16() -> None:
    """By ZeRO, beside layers whose weights are gathered in 8 bits."""
    gathered = fp8.gathered_weights(Setup.of(CASES["zero 3: tensorwise"].job()))
    assert "blocks.0.mlp.shared.up.weight" in gathered
    assert not set(gathered) & {f"{stack}.weight" for stack in STACKS}
