"""Replicas that train alone, saved in the middle of a round and resumed."""

from __future__ import annotations

import atexit
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.storage.manifest import read_manifest
from fivefold.training.checkpoint import load_latest
from fivefold.training.replica_state import replicas_in
from fivefold.training.reshard import arranged
from tests.cases import built_on_cpu
from tests.ranks import on_ranks
from tests.training.replica_cases import CASES, TURNS, case, of
from tests.training.replicas import Mine, assert_close, mine, resumed, saved_half_way, whole

SAVED = 5  # in the middle of a round, with averages on their way
OVERFLOWING: dict[str, Any] = {"precision": "fp16", "loss_scale": 2.0**21}
CASES_SAVED = CASES | {
    "fp16": case("fp16", 2, {"zero": 0}, TURNS, training=OVERFLOWING, optimizer={"lr": 1e-3}),
    "int8": case("int8", 2, {"zero": 0}, {**TURNS, "compress": "int8"}, training={"precision": "fp32"}),
    "bf16 every step": case("bf16 every step", 2, {"zero": 0}, {"outer_delay": 3, "compress": "bf16"}),
}


@cache
def saved(ranks: int) -> tuple[Path, list[dict[str, Mine]]]:
    folder = Path(mkdtemp(prefix="fivefold-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    jobs = {name: one.job() for name, one in CASES_SAVED.items() if one.ranks == ranks}
    return folder, on_ranks(saved_half_way, ranks, jobs, SAVED, folder)


@cache
def taken_up(ranks: int) -> list[dict[str, Mine]]:
    jobs = {name: one.job() for name, one in CASES_SAVED.items() if one.ranks == ranks}
    return on_ranks(resumed, ranks, jobs, saved(ranks)[0])


def assert_same(ours: Mine, theirs: Mine) -> None:
    assert ours.values.keys() == theirs.values.keys()
    for kind, tensors in theirs.values.items():
        assert ours.values[kind].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(ours.values[kind][name], tensor), (kind, name)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if c.ranks > 2 else []) for n, c in CASES_SAVED.items()]
)
def test_a_resumed_run_is_bit_identical(name: str) -> None:
    """Weights, moments, outer state, and what is on its way: as if it had never stopped."""
    ranks = CASES_SAVED[name].ranks
    folder, straight = saved(ranks)
    for before, after in zip(of(straight, name), of(taken_up(ranks), name), strict=True):
        assert_same(after, before)
        assert [(r.loss, r.grad_norm) for r in after.results] == [
            (r.loss, r.grad_norm) for r in before.results[SAVED:]
        ]
    tensors = read_manifest(folder / name / "checkpoints" / f"step-{SAVED}").tensors
    delay = CASES_SAVED[name].job().communication.outer_delay
    assert any(".arriving." in tensor for tensor in tensors) == bool(delay)
    replicas = CASES_SAVED[name].job().layout.dp_replicate
    assert replicas_in(tensors) == replicas


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("turns", {"dp_shard": 2, "zero": 3}),
        ("late", {"tp": 2, "zero": 0}),
        ("every step late", {"pp": 2, "zero": 0}),
        ("tp", {"cp": 2, "zero": 2}),
        ("zero 3", {"zero": 0}),
    ],
)
def test_the_layout_inside_replicas_may_change(before: str, after: dict[str, Any]) -> None:
    one = CASES[before]
    ranks = 2 if after == {"zero": 0} else 4
    moved = replace(one, ranks=ranks, layout={"dp_replicate": 2, **after})
    folder, straight = saved(one.ranks)
    found = on_ranks(resumed, ranks, {f"{before} -> moved": moved.job()}, folder)
    for kind in ("weights", "anchors"):
        expected = whole(of(straight, before), kind)
        assert_close(whole(of(found, f"{before} -> moved"), kind), expected, 1e-11)


def test_a_resharded_checkpoint_has_everything(tmp_path: Path) -> None:
    """For another layout without ranks: every tensor is there, in the pieces of its own replica's ranks."""
    folder, _ = saved(2)
    source = folder / "late" / "checkpoints" / f"step-{SAVED}"
    manifest = read_manifest(source)
    layout = {"dp_replicate": 2, "dp_shard": 2, "zero": 3}
    job = replace(CASES["late"], ranks=4, layout=layout).job()
    cuts = arranged(job, manifest.tensors)
    assert cuts.keys() == manifest.tensors.keys()
    files = {cut.file for name in cuts if name.startswith("replica.1.") for cut in cuts[name]}
    assert files == {"rank-00002.safetensors", "rank-00003.safetensors"}
    files = {cut.file for name in cuts if name.startswith("model.") for cut in cuts[name]}
    assert files == {"rank-00000.safetensors", "rank-00001.safetensors"}


def test_other_settings_of_outer_steps_may_take_over() -> None:
    """Averages on their way are applied when the new delay has passed."""
    folder, _ = saved(2)
    settings = {"local_steps": 2, "fragments": 1, "outer_delay": 1, "outer_momentum": 0.0}
    job = replace(CASES["turns"], communication=settings).job()
    found = on_ranks(resumed, 2, {"turns -> others": job}, folder)
    weights, anchors = (whole(of(found, "turns -> others"), kind) for kind in ("weights", "anchors"))
    for parameter, value in weights[0].items():
        assert torch.equal(value, weights[1][parameter])
        assert torch.equal(value, anchors[0][parameter])


def loaded(world: World, job: Job, folder: Path) -> Mine:
    built = built_on_cpu(job)
    load_latest(built, folder)
    return mine(built, [])


def test_an_ordinary_run_goes_on_from_the_outer_weights() -> None:
    folder, _ = saved(2)
    job = replace(CASES["late"], communication={}).job()
    same = on_ranks(loaded, 2, CASES["late"].job(), folder / "late")
    for rank, before in zip(on_ranks(loaded, 2, job, folder / "late"), same, strict=True):
        for name, weights in rank.values["weights"].items():
            assert torch.equal(weights, before.values["anchors"][name])
            assert torch.equal(rank.values["optimizer 0"][name], same[0].values["optimizer 0"][name])


def test_outer_steps_take_up_an_ordinary_run(tmp_path: Path) -> None:
    ordinary = replace(CASES["late"], communication={}).job()
    straight = on_ranks(saved_half_way, 2, {"ordinary": ordinary}, SAVED, tmp_path)
    found = on_ranks(loaded, 2, CASES["late"].job(), tmp_path / "ordinary")
    for rank in found:
        for name, weights in rank.values["weights"].items():
            assert torch.equal(weights, rank.values["anchors"][name])
            assert torch.equal(weights, found[0].values["weights"][name])
            assert not rank.values["momenta"][name].any()
    assert straight


@pytest.mark.slow
def test_more_replicas_start_as_those_that_were_saved() -> None:
    folder, _ = saved(2)
    more = replace(CASES["late"], ranks=4, layout={"dp_replicate": 4, "zero": 0}).job()
    before = on_ranks(loaded, 2, CASES["late"].job(), folder / "late")
    for rank, found in enumerate(on_ranks(loaded, 4, more, folder / "late")):
        assert_same(found, replace(before[rank % 2]))
