"""Numbers that are not finite, where the job goes on: skipped on all ranks, or rolled back and left out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.comm.world import World, single_world
from fivefold.config import Job, job_with, resolve
from fivefold.config.schema import Resilience
from fivefold.problems import BadInput
from fivefold.storage.folder import folder_of, saved_steps
from fivefold.storage.manifest import read_manifest
from fivefold.training.build import Built
from fivefold.training.checkpoint import buffers
from fivefold.training.failures import NonFiniteError
from fivefold.training.metrics import read_metrics
from fivefold.training.non_finite import MOST_SKIPS, skips_after
from fivefold.training.ranks import run_ranks
from fivefold.training.run import TrainingRun
from fivefold.training.step import StepResult
from tests.cases import SPEC, Case, batches, built_on_cpu

MOE = SPEC | {"experts": 4, "experts_per_token": 2}
AVERAGED = {"ema": 0.9}
BAD, STEPS = 3, 5
NAN = float("nan")


# --- one bad step under every kind of layout -------------------------------------------------------------


def skipping(case: Case) -> Job:
    return case.job().model_copy(update={"resilience": Resilience(non_finite="skip")})


@cache
def layouts() -> tuple[tuple[Job, str, int], ...]:
    """Jobs of two ranks, what goes wrong (the loss, or only gradients), and on which of them."""
    cases = [
        (Case("zero 0", 2, {"zero": 0}, optimizer=AVERAGED), "gradient", 1),
        (Case("zero 3", 2, {"zero": 3}, optimizer=AVERAGED), "loss", 1),
        # Gradients of the first stage alone: the other rank has seen nothing wrong by itself.
        (Case("pp 2", 2, {"pp": 2}, {"micro_batch": 2}, AVERAGED), "gradient", 0),
        (Case("tp 2", 2, {"tp": 2}, optimizer=AVERAGED), "gradient", 1),
        (Case("zero 2, experts", 2, {"zero": 2}, {"balance": "bias"}, AVERAGED, MOE), "gradient", 1),
    ]
    return tuple((skipping(case), plant, guilty) for case, plant, guilty in cases)


def kept(built: Built) -> list[Tensor]:
    """Copies of all that training changes: master and model weights, optimizer states, averages, biases."""
    states = [value for kinds in built.optimizer.state().values() for value in kinds.values()]
    parameters = [parameter for part in built.parts for parameter in part.parameters()]
    biases = buffers(built).get("buffers", {}).values()
    tensors = [*built.weights.masters, *parameters, *states, *biases]
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in tensors]


def with_a_bad_step(world: World, job: Job, plant: str, guilty: int) -> dict[str, Any]:
    """Some steps, of which one goes wrong on one rank, as this rank sees them."""
    built = built_on_cpu(job)
    bad = False

    def poison(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if not bad:
            return None
        if plant == "gradient" and output.requires_grad:
            output.register_hook(lambda gradient: gradient * NAN)
        return output * NAN if plant == "loss" else None

    if world.rank == guilty:
        built.parts[-1].register_forward_hook(poison)
    results: list[StepResult] = []
    same = []
    with batches(job, built) as loader:
        for step in range(1, STEPS + 1):
            bad = step == BAD
            before = kept(built)
            results.append(built.step(next(loader), 1e-2, step))
            same.append(all(torch.equal(a, b) for a, b in zip(before, kept(built), strict=True)))
    return {
        "same": same,
        "results": results,
        "gradients": [g for g in (master.grad for master in built.weights.masters) if g is not None],
        "weights": built.weights.whole(built.weights.masters),
        "averages": built.weights.whole(built.optimizer.ema or []),
    }


def every_layout(world: World) -> list[dict[str, Any]]:
    return [with_a_bad_step(world, *planted) for planted in layouts()]


def test_a_skipped_step_leaves_every_rank_as_it_was_and_all_go_on_like_one_process() -> None:
    by_rank = run_ranks(every_layout, 2)
    plain = {"micro_batch": 8}
    alone = {
        id(spec): with_a_bad_step(
            single_world("cpu"), skipping(Case("alone", 1, {}, more, AVERAGED, spec)), "gradient", 0
        )
        for spec, more in ((SPEC, plain), (MOE, plain | {"balance": "bias"}))
    }
    for number, (job, plant, _) in enumerate(layouts()):
        wanted = alone[id(MOE if job.spec.experts else SPEC)]
        for found in (ranks[number] for ranks in by_rank):
            assert found["same"] == [step == BAD for step in range(1, STEPS + 1)]
            assert [result.skipped for result in found["results"]] == found["same"]
            assert found["gradients"] == []
            bad = found["results"][BAD - 1]
            assert bad.problem is not None
            assert bad.problem.startswith(f"step {BAD}: the {plant}")
            assert bad.imbalance is None
            for mine, theirs in zip(found["results"], wanted["results"], strict=True):
                if not mine.skipped:
                    assert mine.loss == pytest.approx(theirs.loss, rel=1e-11)
                    assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-11)
        for what in ("weights", "averages"):
            found = by_rank[0][number][what]
            assert found.keys() == wanted[what].keys()
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, wanted[what][name], rtol=1e-10, atol=1e-11)


def test_too_many_in_a_row_are_an_error() -> None:
    bad = StepResult(NAN, NAN, 8, skipped=True, problem="step 9: the loss on rank 0 is not finite.")
    overflow, good = replace(bad, problem=None), StepResult(1.0, 1.0, 8)
    assert skips_after(MOST_SKIPS - 2, bad, 9) == MOST_SKIPS - 1
    assert skips_after(MOST_SKIPS - 1, good, 9) == 0
    assert skips_after(MOST_SKIPS - 1, overflow, 9) == MOST_SKIPS - 1  # of fp16's loss scale
    with pytest.raises(NonFiniteError, match=f"not finite. It is the {MOST_SKIPS}th such step in a row"):
        skips_after(MOST_SKIPS - 1, bad, 9)


# --- a model of one's own that cannot read a certain letter -----------------------------------------------

LETTER = "~"


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(260, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        return x * (1 + torch.where(tokens == ord(LETTER), torch.inf, 0.0).to(x.dtype))[..., None]


class Fragile(nn.Module):
    max_seq_len = 64

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Reading()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 260)


def fragile(folder: Path, text: str, policy: str, ranks: int = 1, **more: Any) -> Job:
    """A job of 8 steps in float64 on a text."""
    source = folder / "text.txt"
    source.write_text(text)
    settings = {
        "model.module": f"{__file__}:Fragile",
        "data.source": str(source),
        "data.cache": str(folder / "cache"),
        "data.separate_documents": False,
        "training.steps": 8,
        "training.seq_len": 16,
        "training.global_batch": 4,
        "training.precision": "fp64",
        "optimizer.schedule": "constant",
        "optimizer.lr": 1e-2,
        "optimizer.ema": 0.9,
        "run.tensorboard": False,
        "resilience.non_finite": policy,
        "checkpoint.every": 2,
        "checkpoint.async": False,
    }
    return resolve(job_with(settings | {key.replace("__", "."): v for key, v in more.items()}), ranks)


ONCE = "A sentence that can be read. " * 40 + LETTER + "And more of it, to be read as well. " * 10
"""About 95 sequences of which one cannot be read, and 32 are."""


def to_the_end(job: Job, world: World, folder: Path) -> TrainingRun:
    with TrainingRun(job, world, folder) as run:
        while not run.done:
            run.advance()
    return run


def saved(folder: Path, step: int = 8) -> dict[str, str]:
    """Checksums of all that was saved of a step."""
    return {name: file.checksum for name, file in read_manifest(folder_of(folder, step)).files.items()}


def skipped_in(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder) if record.get("skipped")]


def on_two_ranks(world: World, jobs: dict[str, Job], folder: Path) -> dict[str, Any]:
    runs = {policy: to_the_end(job, world, folder / policy) for policy, job in jobs.items()}
    masters = runs["skip"].built.weights
    return {"weights": masters.whole(masters.masters), "rollbacks": runs["rollback"].rollbacks}


def readable(folder: Path) -> Job:
    """A job that meets the letter in a step behind the third."""
    for seed in range(50):
        job = fragile(folder, ONCE, "skip", training__seed=seed)
        run = to_the_end(job, single_world("cpu"), folder / f"seed-{seed}")
        if [3 < step < 8 for step in skipped_in(folder / f"seed-{seed}")] == [True]:
            assert math.isfinite(run.progress.loss)
            return job
    raise AssertionError("no seed meets the letter once")


def test_what_cannot_be_read_is_skipped_or_rolled_back_and_the_weights_are_the_same(tmp_path: Path) -> None:
    alone = readable(tmp_path)
    (bad,) = skipped_in(tmp_path / f"seed-{alone.training.seed}")
    last = (bad - 1) // 2 * 2  # the last checkpoint before it

    # Rolled back on one process: the last checkpoint, then everything but the bad step.
    job = fragile(tmp_path, ONCE, "rollback", training__seed=alone.training.seed)
    run = to_the_end(job, single_world("cpu"), tmp_path / "alone")
    assert (run.rollbacks, run.progress.left_out) == (1, [bad])
    assert skipped_in(tmp_path / "alone") == [bad]
    assert read_manifest(folder_of(tmp_path / "alone", 8)).progress["left_out"] == [bad]
    lines = [json.loads(line) for line in (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()]
    again = [line["step"] for line in lines]
    assert again == [*range(1, bad), *range(last + 1, 9)]  # steps behind the checkpoint are taken again
    assert saved(tmp_path / "alone") == saved(tmp_path / f"seed-{alone.training.seed}")

    # Stopped right after the rollback and taken up again: it knows which step to leave out.
    with TrainingRun(job, single_world("cpu"), tmp_path / "stopped") as run:
        while run.rollbacks == 0:
            run.advance()
        assert run.progress.step < bad or run.progress.step == last + 1
        run.saver.save(run.progress)
    run = to_the_end(job, single_world("cpu"), tmp_path / "stopped")
    assert (run.rollbacks, run.progress.left_out) == (0, [bad])
    assert saved(tmp_path / "stopped") == saved(tmp_path / "alone")

    # And on two ranks, only one of which meets the letter.
    jobs = {
        policy: fragile(tmp_path, ONCE, policy, 2, training__seed=alone.training.seed, layout__zero=3)
        for policy in ("skip", "rollback")
    }
    found = run_ranks(on_two_ranks, 2, jobs, tmp_path)
    assert [ranks["rollbacks"] for ranks in found] == [1, 1]
    for policy in jobs:
        assert skipped_in(tmp_path / policy) == [bad]
    assert saved(tmp_path / "skip") == saved(tmp_path / "rollback")
    one = run.built.weights.whole(run.built.weights.masters)
    for name, tensor in found[0]["weights"].items():
        torch.testing.assert_close(tensor, one[name], rtol=1e-11, atol=1e-12)


def test_what_never_can_be_read_ends_the_run(tmp_path: Path) -> None:
    hopeless = f"A sentence {LETTER} that cannot. " * 100
    job = fragile(tmp_path, hopeless, "skip", training__steps=MOST_SKIPS + 5)
    with pytest.raises(NonFiniteError, match=f"step {MOST_SKIPS}: .* {MOST_SKIPS}th such step in a row"):
        to_the_end(job, single_world("cpu"), tmp_path / "skip")
    assert skipped_in(tmp_path / "skip") == list(range(1, MOST_SKIPS))

    # Back to the beginning, once for each step, as often as the job allows.
    job = fragile(tmp_path, hopeless, "rollback", resilience__restarts=2, checkpoint__every=0)
    with pytest.raises(NonFiniteError, match="step 3: the loss on rank 0 is not finite"):
        to_the_end(job, single_world("cpu"), tmp_path / "rollback")
    assert saved_steps(tmp_path / "rollback") == [0]
    assert skipped_in(tmp_path / "rollback") == [1, 2]

    with pytest.raises(NonFiniteError, match="step 1: the loss on rank 0 is not finite"):
        to_the_end(fragile(tmp_path, hopeless, "stop"), single_world("cpu"), tmp_path / "stop")


def test_a_rollback_needs_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        fragile(tmp_path, ONCE, "rollback", checkpoint__keep=0)
    assert str(refused.value).startswith("resilience.non_finite: 'rollback' without checkpoints")
