"""Dynamic loss scaling in fp16: an overflow costs a step and nothing else, on every rank alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.comm.world import World, single_world
from fivefold.config import Job
from fivefold.data.batch import NOT_SCORED, Batch
from fivefold.training.build import Built, build
from fivefold.training.failures import NonFiniteError
from fivefold.training.loss_scale import GROWTH_INTERVAL, LossScale
from fivefold.training.ranks import run_ranks
from fivefold.training.run import TrainingRun
from tests.cases import Case, batches


def test_it_halves_at_an_overflow_and_doubles_after_a_long_good_run() -> None:
    scale = LossScale(8.0)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(finite=True)
    assert scale.value == 8.0
    scale.update(finite=False)
    assert scale == LossScale(4.0, good_steps=0)
    for _ in range(GROWTH_INTERVAL):
        assert scale.value == 4.0
        scale.update(finite=True)
    assert scale.value == 8.0
    for _ in range(GROWTH_INTERVAL):
        scale.update(finite=True)
    assert scale.value == 16.0


def test_below_one_it_is_not_the_scale_that_overflows() -> None:
    scale = LossScale(2.0)
    scale.update(finite=False)
    assert scale.usable
    scale.update(finite=False)
    assert not scale.usable


def steps_at(scale: float) -> tuple[list[float], torch.Tensor]:
    """Gradient norms of some SGD steps, and all weights after them."""
    training = {"precision": "fp16", "loss_scale": scale, "clip": 0.0, "micro_batch": 2}
    job = Case("scaled", training=training, optimizer={"name": "sgd"}).job()
    built = build(job, torch.device("cpu"))
    with batches(job, built) as loader:
        norms = [built.step(next(loader), 0.1, step).grad_norm for step in (1, 2, 3)]
    return norms, torch.cat([master.detach().flatten() for master in built.weights.masters])


def test_the_scale_is_taken_out_again_before_anything_sees_a_gradient() -> None:
    norms, weights = steps_at(2.0**5)
    scaled_norms, scaled_weights = steps_at(2.0**12)
    assert scaled_norms == pytest.approx(norms, rel=1e-2)
    torch.testing.assert_close(scaled_weights, weights, rtol=1e-2, atol=1e-3)


def silent(batch: Batch) -> Batch:
    """The same tokens, none of which is to be predicted: they give no gradient at all."""
    return replace(batch, targets=torch.full_like(batch.targets, NOT_SCORED), valid=0)


def kept(built: Built) -> list[torch.Tensor]:
    """Copies of all that training changes: master weights, model weights, optimizer states."""
    states = [value for kinds in built.optimizer.state().values() for value in kinds.values()]
    tensors = [*built.weights.masters, *built.model.parameters(), *states]
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in tensors]


def overflow_on_rank_1(world: World, jobs: list[Job]) -> list[dict[str, Any]]:
    """Only rank 1 has anything to predict until a step succeeds; what every rank saw on the way."""
    found = []
    for job in jobs:
        built = build(job, world.device)
        scale = built.step.scale
        assert scale is not None
        steps = []
        with batches(job, built) as loader:
            for step in range(1, 30):
                before = kept(built)
                given = next(loader)
                result = built.step(
                    given if world.rank == world.size - 1 else [silent(b) for b in given], 1e-3, step
                )
                same = all(torch.equal(a, b) for a, b in zip(before, kept(built), strict=True))
                steps.append((result.skipped, same, scale.value, scale.good_steps))
                if not result.skipped:
                    break
        found.append(
            {"steps": steps, "gradients_left": any(m.grad is not None for m in built.weights.masters)}
        )
    return found


HUGE = {"precision": "fp16", "loss_scale": 2.0**27, "micro_batch": 2}


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_training_recovers(ranks: int) -> None:
    layouts: list[dict[str, Any]] = [{"zero": zero} for zero in (0, 2, 3)] if ranks == 2 else [{}]
    jobs = [Case("huge", ranks, layout, HUGE).job() for layout in layouts]
    by_rank = run_ranks(overflow_on_rank_1, ranks, jobs)
    assert all(found == by_rank[0] for found in by_rank)
    for found in by_rank[0]:
        *skipped, last = found["steps"]
        assert skipped, "the scale was not large enough to overflow"
        for number, step in enumerate(skipped, start=1):
            assert step == (True, True, 2.0 ** (27 - number), 0)
        assert last == (False, False, 2.0 ** (27 - len(skipped)), 1)
        assert not found["gradients_left"]


def test_a_resumed_run_has_the_scale_and_its_count_of_good_steps(tmp_path: Path) -> None:
    job = Case("resumed", training={"precision": "fp16", "loss_scale": 2.0**20, "steps": 6}).job()
    with TrainingRun(job, single_world("cpu"), tmp_path) as run:
        while not run.done:
            run.advance()
        reached = run.built.step.scale
    assert reached is not None
    assert reached.value < 2.0**20, "nothing has overflown"
    assert reached.good_steps > 0
    with TrainingRun(job, single_world("cpu"), tmp_path) as run:
        assert run.progress.step == 6
        assert run.built.step.scale == reached


def test_what_no_scale_can_cure_is_an_error() -> None:
    job = Case("broken", training=HUGE | {"loss_scale": 2.0}).job()
    built = build(job, torch.device("cpu"))
    with torch.no_grad():
        built.weights.masters[3].fill_(float("nan"))
    built.weights.publish()
    with batches(job, built) as loader:
        assert built.step(next(loader), 1e-3, 1).skipped
        with pytest.raises(NonFiniteError, match="step 2: the loss on rank 0 is not finite"):
            built.step(next(loader), 1e-3, 2)
