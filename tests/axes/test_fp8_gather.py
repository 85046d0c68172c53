"""Weights that ZeRO gathers in 8 bits: the bits are those of a gather in bfloat16, in half the bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from fivefold.axes import fp8
from fivefold.axes.layout import Place
from fivefold.axes.messages import Traffic
from fivefold.axes.pieces import part_sizes
from fivefold.axes.runtime.fp8_gather import GatheredWeight
from fivefold.axes.runtime.fp8_grouped import GroupedProduct
from fivefold.axes.runtime.fp8_numbers import E4M3, cast
from fivefold.axes.runtime.fp8_product import weight_columns, weight_rows
from fivefold.axes.runtime.fp8_split import products
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.replay.account import account
from tests.axes.test_fp8_split import EXPERTS, ONE_KEY, ROUNDINGS, WIDE, WIDE_TIED, case
from tests.axes.test_messages import rank_messages
from tests.cases import Case, batches, built_on_cpu, curve
from tests.ranks import on_ranks
from tests.tracer import MessageTracer

IN_FP8 = {"fp8": "tensorwise"}


def cases() -> dict[str, Case]:
    """Every stage of ZeRO, each axis beside it, and what FSDP does with weights at other times."""
    zero_3: dict[str, Any] = {"dp_shard": 2, "zero": 3}
    found: list[tuple[str, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ("zero 1", 2, {"dp_shard": 2, "zero": 1}, {}, WIDE),
        ("zero 3", 2, zero_3, {"fp8_head": True}, WIDE),
        ("uneven", 5, {"dp_shard": 5, "zero": 3}, {"global_batch": 10}, ONE_KEY),
        ("zero 2, by step", 2, {"dp_shard": 2, "zero": 2, "reduce": "step"}, {}, WIDE),
        ("ends in bf16", 2, zero_3, {"fp8_first": 1, "fp8_last": 1}, WIDE),
        ("tied", 2, zero_3, {"fp8_head": True}, WIDE_TIED),
        ("full", 2, zero_3, {"recompute": "full", "fp8_head": True}, WIDE),
        ("selective", 2, zero_3, {"recompute": "selective"}, WIDE),
        ("cp", 2, {"cp": 2, "zero": 3}, {"seq_len": 32}, WIDE),
        ("hsdp", 4, {**zero_3, "dp_replicate": 2}, {}, WIDE),
        ("tp, rows of a matrix", 4, {**zero_3, "tp": 2}, {"fp8_head": True}, ONE_KEY),
        ("pp", 4, {**zero_3, "pp": 2}, {"fp8_head": True}, WIDE),
        ("pp, tied", 4, {**zero_3, "pp": 2}, {"fp8_head": True}, WIDE_TIED),
        ("pp, zero-bubble", 4, {**zero_3, "pp": 2, "schedule": "zero-bubble"}, {"fp8_head": True}, WIDE),
        ("ep", 2, {**zero_3, "ep": 2}, {"routing": "balanced"}, EXPERTS),
    ]
    return {
        name: case(name, ranks, layout, IN_FP8 | training, spec)
        for name, ranks, layout, training, spec in found
    }


CASES = cases()
QUICK = ("zero 1", "zero 3", "uneven")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def steps(job: Job) -> dict[str, Any]:
    """What products take as weights in a step, and its gradients; three more, and what the last one sends."""
    built = built_on_cpu(job)
    taken: dict[str, list[tuple[str, Any, Any]]] = {}

    def look(product: Any, given: Any) -> None:
        weight, scale = given[1], product.weight_scale
        if isinstance(product, GroupedProduct):
            both = product.weight_rows(weight), product.weight_columns(weight)
        else:
            both = weight_rows(weight, scale, None), weight_columns(weight, scale, None, weight)
        taken[product.name] = [
            (type(given[1]).__name__, one.values.view(torch.uint8).clone(), one.scale.clone()) for one in both
        ]

    watched = [product.register_forward_pre_hook(look) for product in products(built.parts)]
    masters = built.weights.whole([master.detach().clone() for master in built.weights.masters])
    tracer, found = MessageTracer(built.mesh), []
    with batches(job, built) as loader:
        first, *others = islice(loader, 4)
        tokens = built.step.count_tokens(first)
        loss = built.step.backward(first, tokens)
        gradients = [gradient.clone() for gradient in built.step.collect()]
        built.weights.clear_gradients()
        for handle in watched:
            handle.remove()
        for number, batch in enumerate(others, start=1):
            with tracer if number == len(others) else torch.enable_grad():
                result = built.step(batch, 1e-2, number)
            found.append((result.loss, result.grad_norm))
    kinds = {type(part) for part in (*built.weights.masters, *map(_own, built.weights.parameters))}
    return {
        "used": taken,
        "masters": masters,
        "gradients": gradients,
        "steps": [(loss.item(), 0.0), *found],
        "traffic": tracer.traffic(),
        "place": built.mesh.place,
        "kinds": {kind.__name__ for kind in kinds},
    }


def _own(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def in_8_bits(world: World, job: Job) -> dict[str, Any]:
    return steps(job)


def in_bf16(world: World, job: Job) -> dict[str, Any]:
    """The same, had nothing been said to FSDP: every rank casts what was gathered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "gathered_weights", lambda setup: [])
        return steps(job)


@cache
def ranks_of(name: str, how: Any = in_8_bits) -> list[dict[str, Any]]:
    return on_ranks(how, CASES[name].ranks, CASES[name].job())


@pytest.mark.parametrize("name", NAMES)
def test_weights_gradients_and_losses_are_those_of_a_gather_in_bf16_bit_for_bit(name: str) -> None:
    narrow = {layer.removesuffix(".weight") for layer in fp8.gathered_weights(Setup.of(CASES[name].job()))}
    assert narrow
    for found, usual in zip(ranks_of(name), ranks_of(name, in_bf16), strict=True):
        assert found["used"].keys() == usual["used"].keys()
        for layer, both in found["used"].items():
            for (kind, numbers, scale), (wide, others, other) in zip(both, usual["used"][layer], strict=True):
                assert (kind == "GatheredWeight") == (layer in narrow)
                assert wide != "GatheredWeight"
                assert torch.equal(numbers, others)
                assert torch.equal(scale, other)
        for gradient, other in zip(found["gradients"], usual["gradients"], strict=True):
            assert torch.equal(gradient, other)
        assert found["steps"] == usual["steps"]
        assert found["kinds"] <= {"Parameter", "Tensor"}


def test_a_weight_is_rounded_to_bf16_before_it_is_cast() -> None:
    """As a gather in bfloat16 rounds it; once would be nearer, and other numbers than under zero 0."""
    every = ranks_of("zero 3")
    masters, differs = every[0]["masters"], 0
    for layer, ((_, numbers, scale), _) in every[0]["used"].items():
        master = masters[f"{layer}.weight"]
        assert torch.equal(numbers, cast(master.bfloat16(), scale, E4M3).values.view(torch.uint8))
        differs += int((numbers != cast(master, scale, E4M3).values.view(torch.uint8)).sum())
    assert differs > 0


@pytest.mark.parametrize("name", NAMES)
def test_messages_are_the_ledgers(name: str) -> None:
    for found in ranks_of(name):
        assert found["traffic"] == account(CASES[name].job(), found["place"]).traffic()


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("ends in bf16", "pp, zero-bubble")])
def test_parts_add_up_to_the_ledger(name: str) -> None:
    """Of blocks that are all alike; the search computes with them, of many layouts at once."""
    job = CASES[name].job()
    for pp in range(job.layout.pp):
        expected, found = account(job, Place(pp=pp)), Counter[tuple[str, str]]()
        for message in rank_messages(job, Place(pp=pp)):
            found[message.operation, message.phase] += round(float(message.payload * message.count))
        wanted = Counter[tuple[str, str]]()
        for message in expected.messages:
            wanted[message.operation, message.phase] += round(float(message.payload * message.count))
        assert found == wanted


def losses(world: World, job: Job) -> list[tuple[float, float]]:
    return curve(built_on_cpu(job), 3)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_compiled_blocks_take_gathered_weights(tp: int) -> None:
    layout = {"dp_shard": 2, "zero": 3, "tp": tp}
    eager, compiled = (case("", 2 * tp, layout, IN_FP8 | {"compile": how}, WIDE) for how in (False, True))
    usual, found = (on_ranks(losses, one.ranks, one.job())[0] for one in (eager, compiled))
    for (loss, norm), (other, other_norm) in zip(usual, found, strict=True):
        assert other == pytest.approx(loss, rel=2.0**-7)
        assert other_norm == pytest.approx(norm, rel=ROUNDINGS)


# --- by hand -----------------------------------------------------------------------------------------------

LLAMA = Setup(
    PRESETS["llama3-8b"], 8192, 64, PRECISIONS["bf16"], fp8="tensorwise", fp8_small=True, zero=3, dp_shard=8
)


def gather(setup: Setup) -> dict[str, Any]:
    """By part, bytes of a gather."""
    state = Traffic(setup).state
    return {part: m.payload for part in state for m in state[part] if m.operation == "all_gather"}


def test_a_block_of_llama3_8b_by_hand() -> None:
    norms, matrices = 2 * 4096, 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    embedding = 128256 * 4096
    assert gather(LLAMA) == {
        "embedding": 2 * embedding,
        "block": matrices + 2 * norms,
        "head": 2 * (embedding + 4096),
    }
    assert gather(replace(LLAMA, fp8_head=True))["head"] == embedding + 2 * 4096
    tied = replace(LLAMA, spec=LLAMA.spec.model_copy(update={"tied": True}), fp8_head=True)
    assert gather(tied)["embedding"] == 2 * (embedding + 4096)
    # Keys and values are too small to take part.
    left = 2 * 1024 * 4096
    assert gather(replace(LLAMA, fp8_small=False))["block"] == matrices + left + 2 * norms


def test_rowwise_gathers_bf16() -> None:
    assert gather(replace(LLAMA, fp8="rowwise")) == gather(replace(LLAMA, fp8="none"))


def test_of_many_layouts_each_gathers_what_it_does_alone() -> None:
    """Some have layers too small for 8 bits on a rank; of one, no rows divide."""
    tp, shards = np.array([1, 2, 8, 4, 1]), np.array([8, 8, 2, 3, 24])
    together = replace(LLAMA, tp=tp, dp_shard=shards, fp8_small=False, fp8_head=True)
    sizes = part_sizes(together)
    for index, (one_tp, one_shard) in enumerate(zip(tp.tolist(), shards.tolist(), strict=True)):
        alone = part_sizes(replace(together, tp=one_tp, dp_shard=one_shard))
        for part, size in alone.items():
            narrow = np.broadcast_to(sizes[part].narrow, tp.shape)
            assert narrow[index] == size.narrow
            gathered = np.broadcast_to(sizes[part].gathered_bytes(PRECISIONS["bf16"]), tp.shape)
            assert gathered[index] == size.gathered_bytes(PRECISIONS["bf16"])
    assert len(set(np.broadcast_to(sizes["block"].narrow, tp.shape).tolist())) > 2


# --- what a gathered weight is -----------------------------------------------------------------------------


def test_a_gathered_weight_cannot_be_taken_for_one_in_bf16() -> None:
    weight = torch.randn(32, 16)
    scale = torch.tensor(2.0)
    gathered = GatheredWeight(cast(weight, scale, E4M3).values, scale)
    gathered.requires_grad_()
    assert gathered.dtype == torch.bfloat16
    part = gathered[8:24]
    assert isinstance(part, GatheredWeight)
    assert torch.equal(part.numbers.float(), gathered.numbers[8:24].float())
    for use in (lambda: F.linear(torch.ones(1, 16).bfloat16(), gathered), gathered.float, gathered.clone):
        with pytest.raises(TypeError, match="gathered in 8 bits"):
            use()
