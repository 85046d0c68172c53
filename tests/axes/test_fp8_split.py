"""Layers in 8 bits under every axis: their messages, their scales, and gradients against one process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.axes import fp8
from fivefold.axes.layout import Place
from fivefold.axes.runtime.fp8_numbers import E4M3, E5M2, largest, scale_for
from fivefold.axes.runtime.fp8_product import Fp8Product
from fivefold.axes.runtime.fp8_split import products
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.ledger.setup import Setup
from fivefold.replay.account import account
from fivefold.training.checkpoint import Progress, load_latest
from tests.cases import SPEC, TIED, Case, batches, built_on_cpu, curve, save
from tests.ranks import on_ranks
from tests.tracer import MessageTracer

WIDE = SPEC | {"vocab_size": 96, "dim": 64, "ffn": 96}
WIDE_TIED = TIED | {"vocab_size": 96, "dim": 64, "ffn": 96}
ONE_KEY = WIDE | {"kv_heads": 1}
EXPERTS = WIDE | {"experts": 4, "experts_per_token": 2, "shared_experts": 1, "layers": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, {}),
    "replicas": (2, {"dp_replicate": 2, "zero": 0}, {}),
    "zero 1": (2, {"dp_shard": 2, "zero": 1}, {}),
    "zero 3": (2, {"dp_shard": 2, "zero": 3}, {}),
    "zero 3, full": (2, {"dp_shard": 2, "zero": 3}, {"recompute": "full"}),
    "tp": (2, {"tp": 2}, {}),
    "tp, whole stream": (2, {"tp": 2, "sequence_parallel": False}, {}),
    "tp, full": (2, {"tp": 2}, {"recompute": "full"}),
    "tp, every-2": (2, {"tp": 2}, {"recompute": "every-2"}),
    "tp, selective": (2, {"tp": 2}, {"recompute": "selective"}),
    "tp, head and ends": (2, {"tp": 2}, {"fp8_head": True, "fp8_first": 1, "fp8_last": 1}),
    "pp": (2, {"pp": 2}, {}),
    "pp, zero-bubble": (2, {"pp": 2, "schedule": "zero-bubble"}, {"fp8_head": True}),
    "cp": (2, {"cp": 2}, {"seq_len": 32}),
    "cp, ulysses": (2, {"cp": 2, "cp_kind": "ulysses"}, {"seq_len": 32}),
    "zero 3 x tp": (4, {"dp_shard": 2, "tp": 2, "zero": 3}, {}),
    "pp, zero-bubble x tp": (4, {"pp": 2, "tp": 2, "schedule": "zero-bubble"}, {}),
}
SPECS = {"tied": WIDE_TIED, "one key": ONE_KEY, "experts": EXPERTS}


def cases() -> dict[str, Case]:
    found = {}
    for scales in ("tensorwise", "rowwise"):
        for name, (ranks, layout, training) in LAYOUTS.items():
            found[f"{name}: {scales}"] = case(name, ranks, layout, {"fp8": scales, **training}, WIDE)
        for name, spec in SPECS.items():
            title = f"tp, {name}: {scales}"
            training = {"fp8": scales, "fp8_head": name == "tied"}
            found[title] = case(title, 2, {"tp": 2}, training, spec)
    found["pp, tied: tensorwise"] = case(
        "pp", 2, {"pp": 2}, {"fp8": "tensorwise", "fp8_head": True}, WIDE_TIED
    )
    experts = {"fp8": "tensorwise", "routing": "balanced"}
    found["ep, experts: tensorwise"] = case("ep", 2, {"dp_shard": 2, "ep": 2, "zero": 3}, experts, EXPERTS)
    return found


def case(
    name: str, ranks: int, layout: dict[str, Any], training: dict[str, Any], spec: dict[str, Any]
) -> Case:
    usual = {"precision": "bf16", "fp8_small": True, "micro_batch": 2, "global_batch": 8}
    return Case(name, ranks, layout, usual | training, spec=spec)


CASES = cases()
QUICK = ("replicas", "zero 3", "tp", "pp, zero-bubble", "one process", "cp")
"""Of `LAYOUTS`, those that are not marked slow."""


def marked(names: Iterable[str]) -> list[Any]:
    """The cases of a test; some of them slow."""
    quick = {f"{name}: {scales}" for name in QUICK for scales in ("tensorwise", "rowwise")} | set(QUICK)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


class Casts(TorchDispatchMode):
    """Notes every cast of an input or output gradient: its format, its rows' smallest scale, its own largest
    number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.fivefold.cast_both.default:
            x, of_rows, _, dtype = args
            self.seen.append((dtype, float(of_rows.min()), float(x.abs().max())))
        elif func is torch.ops.fivefold.scaled_group_product.default:
            rows, scales, *_ = args  # of experts: what was cast, as it goes into a product
            if len(rows):
                self.seen.append((E4M3, float(scales.min()), float(rows.float().abs().max())))
        return func(*args, **(kwargs or {}))


def live(world: World, job: Job) -> dict[str, Any]:
    """A rank's second step: what it sends; then a third's scales and gradients."""
    built = built_on_cpu(job)
    tracer = MessageTracer(built.mesh)
    with batches(job, built) as loader:
        steps = iter(loader)
        first = next(steps)
        tokens = built.step.count_tokens(first)
        with Casts() as casts:
            loss = built.step.backward(first, tokens)
        gradients = built.step.collect()
        total, _ = built.step.totals(loss, gradients)
        whole = {name: g.double() for name, g in built.weights.whole(gradients).items()}
        built.weights.clear_gradients()
        built.step(next(steps), 1e-3, 1)
        with tracer:
            built.step(next(steps), 1e-3, 2)
    scales = None if built.weights.scales is None else built.weights.scales.scales.clone()
    masters = [master.detach().clone() for master in built.weights.masters]
    return {
        "traffic": tracer.traffic(),
        "place": built.mesh.place,
        "loss": total.item(),
        "gradients": whole,
        "casts": casts.seen,
        "scales": scales,
        "masters": built.weights.whole(masters),
    }


@cache
def ranks_of(name: str) -> list[dict[str, Any]]:
    return on_ranks(live, CASES[name].ranks, CASES[name].job())


# --- messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", marked(name for name in CASES if CASES[name].ranks > 1))
def test_messages_are_the_ledgers(name: str) -> None:
    for found in ranks_of(name):
        assert found["traffic"] == account(CASES[name].job(), found["place"]).traffic()


def test_scales_cost_one_message_a_step_and_four_bytes_a_weight() -> None:
    job = CASES["replicas: tensorwise"].job()
    of_bf16 = job.model_copy(
        update={"training": job.training.model_copy(update={"fp8": "none", "fp8_small": False})}
    )
    more = account(job).traffic() - account(of_bf16).traffic()
    assert more == {("all_reduce", 4 * 7 * WIDE["layers"], "dp_replicate"): 1}
    rowwise = account(CASES["replicas: rowwise"].job()).traffic()
    assert rowwise == account(of_bf16).traffic()


# --- scales ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", marked(name for name in CASES if name.endswith("tensorwise")))
def test_scales_of_weights_are_equal_everywhere_and_of_the_weights_as_they_are_now(name: str) -> None:
    every = ranks_of(name)
    names = fp8.weights(Setup.of(CASES[name].job()))
    masters = every[0]["masters"]
    most = torch.stack([masters[name].abs().max() for name in names]).bfloat16().double()
    for found in every:
        scales = found["scales"].double()
        assert ((most * scales <= 448) & (most * scales > 224)).all()
        assert (scales.log2().frac() == 0).all()


def test_scales_of_weights_follow_every_update() -> None:
    """Also what a checkpoint or an outer step brings: whatever is published."""
    built = built_on_cpu(CASES["one process: tensorwise"].job())
    assert built.weights.scales is not None
    before = built.weights.scales.scales.clone()
    with torch.no_grad():
        for master in built.weights.masters:
            master.mul_(16)
    built.weights.publish()
    assert torch.equal(built.weights.scales.scales, before / 16)
    for product in products(built.parts):
        weight = built.parts[0].get_parameter(f"{product.name}.weight")
        assert torch.equal(product.weight_scale, scale_for(largest(weight), E4M3))


@pytest.mark.parametrize("name", marked(name for name in CASES if name.startswith(("tp", "zero 3 x tp"))))
def test_scales_of_activations_and_gradients_are_equal_on_tp_ranks(name: str) -> None:
    by_data: dict[int, list[Any]] = {}
    for found in ranks_of(name):
        scales = [(dtype, scale) for dtype, scale, _ in found["casts"]]
        by_data.setdefault(found["place"].dp_shard, []).append(scales)
    for first, *others in by_data.values():
        assert {dtype for dtype, _ in first} == {E4M3, E5M2}
        for other in others:
            assert other == first


@pytest.mark.parametrize("scales", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("name", marked(["replicas", "zero 1", "zero 3"]))
def test_data_ranks_scale_what_one_process_does_for_the_same_pieces(name: str, scales: str) -> None:
    """One process has the pieces one after the other, of which each of two ranks has half."""
    alone = ranks_of(f"one process: {scales}")[0]["casts"]
    first, second = (found["casts"] for found in ranks_of(f"{name}: {scales}"))
    assert len(first) + len(second) == len(alone) > 0
    assert Counter(first + second) == Counter(alone)
    assert first != second


# --- gradients ---------------------------------------------------------------------------------------------


def rms_error(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The worst relative error of a parameter's gradient, in the root mean square."""
    usual = math.sqrt(
        sum(float(g.square().sum()) for g in reference.values()) / sum(g.numel() for g in reference.values())
    )
    return max(
        float((found[name] - g).norm()) / max(float(g.norm()), 0.1 * usual * math.sqrt(g.numel()))
        for name, g in reference.items()
    )


OF_DATA = ("replicas", "zero 1", "zero 3", "zero 3, full", "pp", "pp, zero-bubble")
"""Layouts whose ranks compute what one process does, number by number; only sums over ranks differ."""


@pytest.mark.parametrize("scales", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("name", marked(OF_DATA))
def test_gradients_are_one_processs_where_only_sums_over_micro_batches_differ(name: str, scales: str) -> None:
    """Those sums are in float32. (Weights of a step were rounded before: their scales are the same.)"""
    split = CASES[f"{name}: {scales}"]
    alone = on_ranks(live, 1, case("alone", 1, {}, dict(split.training), split.spec).job())[0]
    found = ranks_of(f"{name}: {scales}")[0]
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert rms_error(found["gradients"], alone["gradients"]) < 2e-6


ROUNDINGS = 2.0**-3
"""The largest relative error of a cast to e5m2. Where a sum over ranks is rounded once more to bfloat16, few
numbers come to lie on the other side of a tie and are cast otherwise: together less than one cast of all."""


@pytest.mark.parametrize("scales", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("name", marked(name for name in LAYOUTS if name not in (*OF_DATA, "one process")))
def test_gradients_are_as_near_one_processs_as_rounding_allows(name: str, scales: str) -> None:
    split = CASES[f"{name}: {scales}"]
    training = {key: value for key, value in split.training.items() if key != "recompute"}
    alone = on_ranks(live, 1, case("alone", 1, {}, training, split.spec).job())[0]
    found = ranks_of(f"{name}: {scales}")[0]
    assert found["loss"] == pytest.approx(alone["loss"], rel=2.0**-8)
    assert rms_error(found["gradients"], alone["gradients"]) < ROUNDINGS


@pytest.mark.parametrize("scales", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("mode", marked(["full", "every-2", "selective"]))
def test_recomputing_changes_no_bit(mode: str, scales: str) -> None:
    usual = ranks_of(f"tp: {scales}")[0]
    again = ranks_of(f"tp, {mode}: {scales}")[0]
    assert again["loss"] == usual["loss"]
    assert rms_error(again["gradients"], usual["gradients"]) == 0


# --- saved and resumed -------------------------------------------------------------------------------------


def resumed(world: World, job: Job, folder: str, steps: int) -> list[tuple[float, float]]:
    """The next steps of a run, from its checkpoint, if there is one; another is left behind."""
    built = built_on_cpu(job)
    progress, _ = load_latest(built, Path(folder))
    start = progress.step if progress else 0
    found = []
    with batches(job, built, start) as loader:
        for step in range(start + 1, start + steps + 1):
            result = built.step(next(loader), 1e-2, step)
            found.append((result.loss, result.grad_norm))
    save(built, Path(folder), Progress(start + steps, 0))
    return found


@pytest.mark.parametrize(
    "name",
    [
        "zero 3: tensorwise",
        *(pytest.param(f"tp: {s}", marks=pytest.mark.slow) for s in ("tensorwise", "rowwise")),
    ],
)
def test_a_resumed_run_is_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    job = CASES[name].job()
    whole = on_ranks(resumed, 2, job, str(tmp_path / "whole"), 4)[0]
    halves = [on_ranks(resumed, 2, job, str(tmp_path / "halves"), 2)[0] for _ in range(2)]
    assert halves[0] + halves[1] == whole


def scales_after_loading(world: World, job: Job, folder: str) -> list[float]:
    built = built_on_cpu(job)
    before = built.weights.scales
    assert before is not None
    load_latest(built, Path(folder))
    return list(before.scales.tolist())


def test_another_layout_takes_a_checkpoint_up_with_the_same_scales(tmp_path: Path) -> None:
    on_ranks(resumed, 2, CASES["zero 3: tensorwise"].job(), str(tmp_path), 3)
    every = [
        scales
        for name in ("zero 3", "tp", "pp", "replicas")
        for scales in on_ranks(scales_after_loading, 2, CASES[f"{name}: tensorwise"].job(), str(tmp_path))
    ]
    assert all(scales == every[0] for scales in every)


# --- and compiled ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["tensorwise", "rowwise"])
def test_a_compiled_model_computes_the_same_within_rounding(scales: str) -> None:
    usual = case("eager", 1, {}, {"fp8": scales}, WIDE)
    compiled = case("compiled", 1, {}, {"fp8": scales, "compile": True}, WIDE)
    eager, found = (curve(built_on_cpu(one.job()), 3) for one in (usual, compiled))
    for (loss, norm), (other, other_norm) in zip(eager, found, strict=True):
        assert other == pytest.approx(loss, rel=2.0**-7)
        assert other_norm == pytest.approx(norm, rel=ROUNDINGS)


def test_products_are_found_in_forward_order() -> None:
    built = built_on_cpu(CASES["one process: tensorwise"].job())
    names = [product.name for product in products(built.parts)]
    assert names[0] == "blocks.0.attention.query"
    assert names[-1] == "blocks.3.mlp.down"
    assert len(names) == 28
    assert all(isinstance(product, Fp8Product) for product in products(built.parts))
    assert Place() == built.mesh.place
