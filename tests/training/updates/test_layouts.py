"""Narrow states: given the same gradients, the same bits under every layout, and when one takes over."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.axes.matrices import is_matrix
from fivefold.comm.world import World
from fivefold.storage.folder import verified
from fivefold.training.build import Built
from fivefold.training.checkpoint import Progress, load_latest
from fivefold.training.reshard import reshard
from fivefold.training.updates.muon import Muon
from tests.cases import SPEC, Case, built_on_cpu, save
from tests.ranks import on_ranks
from tests.training.updates.given import CODES, MUON, RATES, STATES, give_gradients

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


KINDS: dict[str, dict[str, Any]] = {
    "bf16": STATES,
    "int8": CODES,
    "muon": MUON | {"states": "int8"},  # momentum in bf16, AdamW's moments in 8 bits
}


def case(name: str, ranks: int, kind: str) -> Case:
    layout = (LAYOUTS | BOTH).get(name, {})
    return Case(name, ranks, layout, {"precision": "bf16", "micro_batch": 2}, KINDS[kind], MOE)


def update(built: Built, start: int, end: int) -> None:
    for step in range(start + 1, end + 1):
        give_gradients(built, step)
        built.optimizer.step(RATES[step - 1], torch.tensor(0.7))


def whole(built: Built) -> dict[str, torch.Tensor]:
    """Weights, but for those that depend on sums of others', and both moments, or the only one; on rank 0."""
    weights, updates = built.weights, built.optimizer.update_of
    kept = {"weight": [master.detach() for master in weights.masters]}
    for which in (0, -1):
        kept[f"moment {which}"] = [
            updates[i].states(i)[updates[i].kinds[which]].float() for i in range(len(weights.names))
        ]
    muons = any(isinstance(rule, Muon) for rule in updates.values())
    return {
        f"{parameter} {kind}": value
        for kind, values in kept.items()
        for parameter, value in weights.whole(values).items()
        if not (muons and kind == "weight" and is_matrix(built.job.spec, parameter, value.shape))
    }


def updated(world: World, names: list[str], kind: str) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name in names:
        built = built_on_cpu(case(name, world.size, kind).job())
        update(built, 0, len(RATES))
        found[name] = whole(built)
    return found


@cache
def alone(kind: str) -> dict[str, torch.Tensor]:
    return on_ranks(updated, 1, ["alone"], kind)[0]["alone"]


@cache
def on_two(kind: str) -> dict[str, dict[str, torch.Tensor]]:
    return on_ranks(updated, 2, list(LAYOUTS), kind)[0]


@cache
def on_four(kind: str) -> dict[str, dict[str, torch.Tensor]]:
    return on_ranks(updated, 4, list(BOTH), kind)[0]


def assert_same(found: dict[str, torch.Tensor], kind: str) -> None:
    """As on one process."""
    assert found.keys() == alone(kind).keys()
    for key, value in alone(kind).items():
        assert value.isfinite().all()
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(n, marks=pytest.mark.slow) for n in BOTH)])
def test_every_layout_keeps_the_same_bits(name: str, kind: str) -> None:
    """An update of moments is a function of one element and its gradient."""
    assert_same(on_two(kind)[name] if name in LAYOUTS else on_four(kind)[name], kind)


HALF = 2


STORED = {"bf16": {"BF16"}, "int8": {"U8"}, "muon": {"U8", "BF16"}}


def saving(world: World, name: str, kind: str, run: Path) -> None:
    built = built_on_cpu(case(name, world.size, kind).job())
    update(built, 0, HALF)
    save(built, run, Progress(HALF, 0, loss=2.5))


def going_on(world: World, names: dict[str, Path], kind: str) -> dict[str, dict[str, torch.Tensor]]:
    """Take each run up under the layout of this name, and go on to the end."""
    found = {}
    for name, run in names.items():
        built = built_on_cpu(case(name, world.size, kind).job())
        assert load_latest(built, run) == (Progress(HALF, 0, loss=2.5), [])
        update(built, HALF, len(RATES))
        found[name] = whole(built)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Saved under ZeRO 3, taken up by one process and by others, as it is and arranged for them."""
    on_ranks(saving, 2, "zero 3", kind, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / f"step-{HALF}"
    stored = verified(folder).tensors
    kinds = {stored[name].dtype for name in stored if name.split(".")[-1] in ("exp_avg", "momentum_buffer")}
    assert kinds == STORED[kind]
    reshard(folder, verified(folder), case("tp", 2, kind).job(), 2, tmp_path / "arranged")
    assert_same(on_ranks(going_on, 1, {"alone": tmp_path / "run"}, kind)[0]["alone"], kind)
    runs = dict.fromkeys(("zero 3", "ep", "pp"), tmp_path / "run") | {"tp": tmp_path / "arranged"}
    for found in on_ranks(going_on, 2, runs, kind)[0].values():
        assert_same(found, kind)
