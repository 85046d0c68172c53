"""The optimizer against torch's plain one on the same gradients; the moving average; what it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.training.build import Built, build
from fivefold.training.ranks import run_ranks
from fivefold.training.updates.by_torch import TorchUpdate
from fivefold.training.weights import local
from tests.cases import SPEC, TIED, Case, batches

RATES = (1e-2, 3e-2, 1e-3, 2e-2)
ADAMW = {"name": "adamw", "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.3}
SGD = {"name": "sgd", "momentum": 0.7, "weight_decay": 0.3}
PLAIN_SGD = SGD | {"momentum": 0.0}


def small(optimizer: dict[str, Any], **training: Any) -> Built:
    return build(
        Case("small", training=training, optimizer=optimizer, spec=TIED | {"layers": 1}).job(),
        torch.device("cpu"),
    )


def give_gradients(masters: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for master in masters:
        gradient = torch.randn(master.shape, generator=generator, dtype=torch.float64)
        master.grad = gradient.to(master.dtype)


def reference(masters: list[torch.Tensor], settings: dict[str, Any]) -> torch.optim.Optimizer:
    """Torch's own, one tensor at a time; matrices decay."""
    groups = [{"params": [m], "weight_decay": settings["weight_decay"] * (m.dim() >= 2)} for m in masters]
    if settings["name"] == "adamw":
        return torch.optim.AdamW(groups, betas=settings["betas"], eps=settings["eps"], foreach=False)
    return torch.optim.SGD(groups, momentum=settings["momentum"], foreach=False)


@pytest.mark.parametrize("settings", [ADAMW, SGD, PLAIN_SGD])
def test_several_steps_are_those_of_torch(settings: dict[str, Any]) -> None:
    built = small(settings)
    masters = built.weights.masters
    theirs = [master.detach().clone().requires_grad_() for master in masters]
    plain = reference(theirs, settings)
    for number, lr in enumerate(RATES):
        give_gradients(masters, number)
        give_gradients(theirs, number)
        built.optimizer.step(lr)
        for group in plain.param_groups:
            group["lr"] = lr
        plain.step()
        for name, ours, other in zip(built.weights.names, masters, theirs, strict=True):
            torch.testing.assert_close(ours.detach(), other.detach(), rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("settings", [ADAMW, SGD])
def test_only_matrices_decay(settings: dict[str, Any]) -> None:
    built = small(settings)
    masters = built.weights.masters
    before = [master.detach().clone() for master in masters]
    for master in masters:
        master.grad = torch.zeros_like(master)
    built.optimizer.step(0.1)
    ranks = set()
    for name, old, new in zip(built.weights.names, before, masters, strict=True):
        kept = 1 - 0.1 * 0.3 if old.dim() >= 2 else 1.0
        torch.testing.assert_close(new.detach(), old * kept, rtol=1e-14, atol=0.0, msg=name)
        ranks.add(old.dim())
    assert ranks == {1, 2}


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_the_average_follows_its_recurrence(precision: str) -> None:
    built = small(ADAMW | {"ema": 0.75}, precision=precision)
    masters = built.weights.masters
    expected = [master.detach().clone() for master in masters]
    for number, lr in enumerate(RATES):
        give_gradients(masters, number)
        built.optimizer.step(lr)
        expected = [0.75 * e + 0.25 * m.detach() for e, m in zip(expected, masters, strict=True)]
    assert built.optimizer.ema is not None
    for name, found, wanted in zip(built.weights.names, built.optimizer.ema, expected, strict=True):
        torch.testing.assert_close(found, wanted, msg=name)
        assert found.dtype == masters[0].dtype


def test_the_model_computes_with_the_new_weights() -> None:
    built = small(ADAMW, precision="bf16")
    give_gradients(built.weights.masters, 0)
    built.optimizer.step(0.1)
    for parameter, master in zip(built.model.parameters(), built.weights.masters, strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, master.bfloat16())


@pytest.mark.parametrize("settings", [ADAMW | {"ema": 0.9}, SGD, PLAIN_SGD | {"ema": 0.9}])
def test_a_fresh_optimizer_given_the_state_goes_on_alike(settings: dict[str, Any]) -> None:
    first, second = small(settings), small(settings)
    for number, lr in enumerate(RATES[:2]):
        give_gradients(first.weights.masters, number)
        first.optimizer.step(lr)
    with torch.no_grad():
        for source, target in zip(first.weights.masters, second.weights.masters, strict=True):
            target.copy_(source)
        kept, empty = first.optimizer.state(), second.optimizer.state()
        for name, kinds in kept.items():
            assert kinds.keys() == empty[name].keys()
            for kind, value in kinds.items():
                empty[name][kind].copy_(value)
    for built in (first, second):
        give_gradients(built.weights.masters, 9)
        built.optimizer.step(RATES[2])
    for name, one, other in zip(
        first.weights.names, first.weights.masters, second.weights.masters, strict=True
    ):
        assert torch.equal(one, other), name
    assert first.optimizer.ema is None or second.optimizer.ema is not None
    for one, other in zip(first.optimizer.ema or [], second.optimizer.ema or [], strict=True):
        assert torch.equal(one, other)


# --- shards without rows -----------------------------------------------------------------------------------

ONE_ROW = SPEC | {"dim": 8, "heads": 8, "kv_heads": 4, "positions": "learned", "qk_norm": True}  # head_dim 1


def steps_with_empty_shards(world: World, job: Job) -> dict[str, Any]:
    built = build(job, world.device)
    with batches(job, built) as loader:
        curve = [built.step(next(loader), lr, step).loss for step, lr in enumerate(RATES, start=1)]
    states = built.optimizer.state()
    return {
        "curve": curve,
        "empty": [
            n for n, m in zip(built.weights.names, built.weights.masters, strict=True) if not m.numel()
        ],
        "steps": {kinds["step"].item() for kinds in states.values()},
        "local": {name: local(kinds["exp_avg"]).numel() for name, kinds in states.items()},
        "whole": {name: tuple(kinds["ema"].shape) for name, kinds in states.items()},
    }


def test_a_parameter_with_fewer_rows_than_ranks() -> None:
    optimizer = {"ema": 0.9}
    alone = run_ranks(steps_with_empty_shards, 1, Case("alone", spec=ONE_ROW, optimizer=optimizer).job())[0]
    job = Case("split", 2, {"zero": 3}, spec=ONE_ROW, optimizer=optimizer).job()
    first, second = run_ranks(steps_with_empty_shards, 2, job)
    assert first["empty"] == []
    assert len(second["empty"]) == 2 * SPEC["layers"]
    assert all(second["local"][name] == 0 for name in second["empty"])
    for found in (first, second):
        assert found["curve"] == pytest.approx(alone["curve"], rel=1e-12)
        assert found["steps"] == {float(len(RATES))}, "a checkpoint may take the count from any rank"
        assert found["whole"] == alone["whole"]


def test_a_rank_whose_shards_are_all_empty_counts_along() -> None:
    settings = Case("adamw", optimizer=ADAMW).job().optimizer
    masters = [torch.zeros(0, 4), torch.zeros(0)]
    update = TorchUpdate(settings, masters, [True, False], [0, 1])
    for lr in RATES:
        update.step(lr)
    for index, master in enumerate(masters):
        states = update.states(index)
        assert states["step"] == len(RATES)
        assert states["exp_avg"].shape == states["exp_avg_sq"].shape == master.shape
    update.states(0)["step"].fill_(9)  # as a checkpoint does
    update.step(RATES[0])
    assert update.states(1)["step"] == 10
