"""What was saved under one layout goes on under any other as if it had never stopped.

Model, optimizer, averages, balancing biases, schedule and place in the data; eight layouts, each to each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.axes.runtime.data_split import local_slab
from fivefold.axes.slabs import slabs
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.storage.folder import verified
from fivefold.training.build import Built
from fivefold.training.checkpoint import Progress, buffers, load_latest
from fivefold.training.learning_rate import learning_rate
from fivefold.training.ranks import run_ranks
from fivefold.training.reshard import arranged, reshard
from tests.cases import Case, batches, built_on_cpu, save

SAVED, NEXT = 2, 2
MODEL: dict[str, Any] = {
    "vocab_size": 67,
    "dim": 16,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 24,
    "max_seq_len": 64,
    "tied": True,
    "experts": 4,
    "experts_per_token": 2,
}
BIASED = {"balance": "bias", "balance_rate": 0.01}


def case(ranks: int, layout: dict[str, Any]) -> Case:
    return Case("", ranks, layout, BIASED, {"ema": 0.9}, MODEL)


LAYOUTS = {
    "one rank": case(1, {}),
    "zero 0": case(2, {"zero": 0}),
    "zero 1": case(2, {"zero": 1}),
    "tp": case(2, {"tp": 2}),
    "pp zbv": case(2, {"pp": 2, "schedule": "zbv"}),
    "cp zero 3": case(2, {"cp": 2, "zero": 3}),
    "4 ranks zero 2": case(4, {"dp_shard": 4, "zero": 2}),
    "4 ranks ep pp zero 3": case(4, {"dp_shard": 2, "ep": 2, "pp": 2, "schedule": "interleaved", "zero": 3}),
}
PAIRS = [(source, target) for source in LAYOUTS for target in LAYOUTS if source != target]
FEW = [
    ("one rank", "tp"),
    ("tp", "one rank"),
    ("one rank", "pp zbv"),
    ("pp zbv", "cp zero 3"),
    ("cp zero 3", "zero 0"),
    ("tp", "zero 1"),
]


@dataclass(frozen=True)
class Reached:
    """Loss and gradient norm of each step, and then the whole weights and their averages (on rank 0)."""

    curve: list[tuple[float, float]]
    weights: dict[str, torch.Tensor]
    averages: dict[str, torch.Tensor]


def advanced(built: Built, start: int, end: int) -> Reached:
    job, curve = built.job, []
    with batches(job, built, start) as loader:
        for step in range(start + 1, end + 1):
            result = built.step(next(loader), learning_rate(job.optimizer, step, job.training.steps), step)
            curve.append((result.loss, result.grad_norm))
    weights, averages = built.weights, built.optimizer.ema
    return Reached(curve, weights.whole(weights.masters), weights.whole(averages) if averages else {})


def saving(world: World, jobs: dict[str, Job], runs: Path) -> None:
    for name, job in jobs.items():
        built = built_on_cpu(job)
        advanced(built, 0, SAVED)
        save(built, runs / name, Progress(SAVED, 0))


def going_on(world: World, pairs: dict[tuple[str, str], Job], runs: Path) -> dict[tuple[str, str], Reached]:
    found = {}
    for (source, target), job in pairs.items():
        built = built_on_cpu(job)
        named = zip(built.weights.names, built.weights.parameters, strict=True)
        assert slabs(job, built.mesh.place) == {name: local_slab(parameter) for name, parameter in named}
        progress, damaged = load_latest(built, runs / source)
        assert progress is not None
        assert (progress.step, damaged) == (SAVED, [])
        if (arranged := runs / f"{source} to {target}").exists():
            other = built_on_cpu(job)
            assert repr(load_latest(other, arranged)[0]) == repr(progress)
            assert_same_state(built, other)
        found[source, target] = advanced(built, SAVED, SAVED + NEXT)
    return found


def assert_same_state(one: Built, other: Built) -> None:
    """Bit for bit, on this rank."""
    for built in (one, other):
        assert all(master.isfinite().all() for master in built.weights.masters)
    kept = [
        [*b.weights.masters, *b.optimizer.tensors(), *buffers(b)["buffers"].values()] for b in (one, other)
    ]
    assert len(kept[0]) > 3 * len(one.weights.masters)
    for mine, theirs in zip(*kept, strict=True):
        assert torch.equal(mine, theirs)


def moved(
    pairs: Iterable[tuple[str, str]], runs: Path, resharded: Iterable[tuple[str, str]] = ()
) -> dict[tuple[str, str], Reached]:
    """Save under every layout that pairs begin with, go on under those they end with.

    resharded  pairs for which the checkpoint is also arranged for the other layout, and compared
    """
    found: dict[tuple[str, str], Reached] = {}
    for ranks in (1, 2, 4):
        if jobs := {s: LAYOUTS[s].job() for s, _ in pairs if LAYOUTS[s].ranks == ranks}:
            run_ranks(saving, ranks, jobs, runs)
    for source, target in resharded:
        folder = runs / source / "checkpoints" / f"step-{SAVED}"
        case = LAYOUTS[target]
        reshard(folder, verified(folder), case.job(), case.ranks, runs / f"{source} to {target}")
    for ranks in (1, 2, 4):
        if resumed := {pair: LAYOUTS[pair[1]].job() for pair in pairs if LAYOUTS[pair[1]].ranks == ranks}:
            found |= run_ranks(going_on, ranks, resumed, runs)[0]
    return found


def never_stopped() -> Reached:
    """On one process, of the steps after the one that is saved."""
    reached = advanced(built_on_cpu(LAYOUTS["one rank"].job()), 0, SAVED + NEXT)
    return Reached(reached.curve[SAVED:], reached.weights, reached.averages)


def assert_go_on(found: dict[tuple[str, str], Reached]) -> None:
    expected = never_stopped()
    assert len(set(expected.curve)) == NEXT
    for pair, reached in found.items():
        for one, other in zip(reached.curve, expected.curve, strict=True):
            assert one == pytest.approx(other, rel=1e-9), pair
        for mine, true in ((reached.weights, expected.weights), (reached.averages, expected.averages)):
            assert mine.keys() == true.keys()
            for name, value in mine.items():
                torch.testing.assert_close(value, true[name], rtol=1e-9, atol=1e-11, msg=f"{pair} {name}")


def assert_arranged_as_saved(runs: Path) -> None:
    """What `reshard` says the ranks of a layout keep is what they have written."""
    compared = 0
    for name, case in LAYOUTS.items():
        folder = runs / name / "checkpoints" / f"step-{SAVED}"
        if folder.exists():
            tensors = verified(folder).tensors
            for tensor, cuts in arranged(case.job(), tensors).items():
                written = {(tuple(p.start), tuple(p.shape)) for p in tensors[tensor].pieces}
                assert {(cut.start, cut.shape) for cut in cuts} == written, (name, tensor)
                compared += len(cuts)
    assert compared > len(MODEL)


def test_some_layouts_to_others(tmp_path: Path) -> None:
    found = moved(FEW, tmp_path, resharded=FEW)
    assert found.keys() == set(FEW)
    assert_go_on(found)
    assert_arranged_as_saved(tmp_path)


@pytest.mark.slow
def test_every_layout_to_every_other(tmp_path: Path) -> None:
    found = moved(PAIRS, tmp_path)
    assert len(found) == 8 * 7
    assert_go_on(found)
    assert_arranged_as_saved(tmp_path)
