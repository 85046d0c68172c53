"""Moments in 16 bits: given the same gradients, the same bits under every layout, and when one takes over."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from fivefold.comm.world import World
from fivefold.storage.folder import verified
from fivefold.training.build import Built
from fivefold.training.checkpoint import Progress, load_latest
from fivefold.training.reshard import reshard
from fivefold.training.updates.adamw import MOMENTS
from tests.cases import SPEC, Case, built_on_cpu, save
from tests.ranks import on_ranks
from tests.training.updates.given import RATES, STATES, give_gradients

MOE = SPEC | {"layers": 2, "experts": 4, "experts_per_token": 2, "vocab_size": 67}
LAYOUTS = {
    "zero 0": {"zero": 0},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "tp": {"tp": 2},
    "ep": {"dp_shard": 2, "ep": 2, "zero": 3},
    "pp": {"pp": 2},
}
BOTH = {"tp zero 3": {"tp": 2, "dp_shard": 2, "zero": 3}, "ep zero 3": {"dp_shard": 4, "ep": 2, "zero": 3}}


def case(name: str, ranks: int) -> Case:
    layout = (LAYOUTS | BOTH).get(name, {})
    return Case(name, ranks, layout, {"precision": "bf16", "micro_batch": 2}, STATES, MOE)


def update(built: Built, start: int, end: int) -> None:
    for step in range(start + 1, end + 1):
        give_gradients(built, step)
        built.optimizer.step(RATES[step - 1], torch.tensor(0.7))


def whole(built: Built) -> dict[str, torch.Tensor]:
    """Weights and moments; on rank 0."""
    weights, updates = built.weights, built.optimizer.update_of
    kept = {"weight": [master.detach() for master in weights.masters]}
    for kind in MOMENTS:
        kept[kind] = [updates[i].states(i)[kind].float() for i in range(len(weights.names))]
    return {
        f"{parameter} {kind}": value
        for kind, values in kept.items()
        for parameter, value in weights.whole(values).items()
    }


def updated(world: World, names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name in names:
        built = built_on_cpu(case(name, world.size).job())
        update(built, 0, len(RATES))
        found[name] = whole(built)
    return found


@cache
def alone() -> dict[str, torch.Tensor]:
    return on_ranks(updated, 1, ["alone"])[0]["alone"]


@cache
def on_two() -> dict[str, dict[str, torch.Tensor]]:
    return on_ranks(updated, 2, list(LAYOUTS))[0]


@cache
def on_four() -> dict[str, dict[str, torch.Tensor]]:
    return on_ranks(updated, 4, list(BOTH))[0]


def assert_same(found: dict[str, torch.Tensor]) -> None:
    """As on one process."""
    assert found.keys() == alone().keys()
    for key, value in alone().items():
        assert value.isfinite().all()
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(n, marks=pytest.mark.slow) for n in BOTH)])
def test_every_layout_keeps_the_same_bits(name: str) -> None:
    """An update is a function of one element and its gradient."""
    assert_same(on_two()[name] if name in LAYOUTS else on_four()[name])


HALF = 2


def saving(world: World, name: str, run: Path) -> None:
    built = built_on_cpu(case(name, world.size).job())
    update(built, 0, HALF)
    save(built, run, Progress(HALF, 0, loss=2.5))


def going_on(world: World, names: dict[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    """Take each run up under the layout of this name, and go on to the end."""
    found = {}
    for name, run in names.items():
        built = built_on_cpu(case(name, world.size).job())
        assert load_latest(built, run) == (Progress(HALF, 0, loss=2.5), [])
        update(built, HALF, len(RATES))
        found[name] = whole(built)
    return found


def test_any_layout_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Saved under ZeRO 3, taken up by one process and by others, as it is and arranged for them."""
    on_ranks(saving, 2, "zero 3", tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / f"step-{HALF}"
    stored = verified(folder).tensors
    assert {stored[name].dtype for name in stored if "exp_avg" in name} == {"BF16"}
    reshard(folder, verified(folder), case("tp", 2).job(), 2, tmp_path / "arranged")
    assert_same(on_ranks(going_on, 1, {"alone": tmp_path / "run"})[0]["alone"])
    runs = dict.fromkeys(("zero 3", "ep", "pp"), tmp_path / "run") | {"tp": tmp_path / "arranged"}
    for found in on_ranks(going_on, 2, runs)[0].values():
        assert_same(found)
