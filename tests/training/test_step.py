"""One optimizer step: a hand-written loop computes the same, and a token counts alike wherever it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.data.batch import NOT_SCORED, Batch
from fivefold.models.decoder import Decoder
from fivefold.training.build import build
from fivefold.training.ranks import run_ranks
from fivefold.verification import gradient_error
from tests.cases import SPEC, TIED, Case, batches

RATES = (1e-2, 3e-2, 1e-2, 3e-3)


def test_a_loop_written_by_hand_computes_the_same() -> None:
    job = Case("by hand", training={"micro_batch": 2, "clip": 0.5}, spec=TIED).job()
    built = build(job, torch.device("cpu"))
    model = Decoder(job.spec).double()
    model.load_state_dict({name: value.clone() for name, value in built.model.state_dict().items()})
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    with batches(job, built) as loader:
        for step, lr in enumerate(RATES, start=1):
            given = next(loader)
            result = built.step(given, lr, step)
            tokens = sum(int((batch.targets != -100).sum()) for batch in given)
            total = 0.0
            optimizer.zero_grad()
            for batch in given:
                logits = model(batch.tokens, documents=batch.documents)
                loss = (
                    F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum") / tokens
                )
                loss.backward()
                total += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            assert result.tokens == tokens
            assert result.loss == pytest.approx(total, rel=1e-13)
            assert result.grad_norm == pytest.approx(norm.item(), rel=1e-13)
            assert norm > 0.5, "nothing was clipped"
    for (name, ours), theirs in zip(built.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-11, atol=1e-13, msg=name)
    assert all(master.grad is None for master in built.weights.masters)


# --- a token counts alike wherever it is -------------------------------------------------------------------


def uneven(batch: Batch, number: int) -> Batch:
    """Sequence `number` of the global batch keeps its first 2 * number + 1 targets: no two have as many."""
    targets = batch.targets.clone()
    targets[:, 2 * number + 1 :] = NOT_SCORED
    return replace(batch, targets=targets, valid=int((targets != NOT_SCORED).sum()))


def uneven_gradients(world: World, jobs: dict[str, Job]) -> dict[str, Any]:
    """Each micro-batch is one sequence, so that its number in the global batch is known."""
    found = {}
    for name, job in jobs.items():
        built = build(job, world.device)
        ranks = built.mesh.layout.data_ranks
        with batches(job, built) as loader:
            given = [uneven(batch, m * ranks + built.mesh.data_rank) for m, batch in enumerate(next(loader))]
        tokens = built.step.count_tokens(given)
        loss = built.step.backward(given, tokens)
        gradients = built.step.collect()
        total, _ = built.step.totals(loss, gradients)
        found[name] = {"tokens": tokens, "loss": float(total), "gradients": built.weights.whole(gradients)}
    return found


def test_uneven_ranks_and_micro_batches_weigh_tokens_alike() -> None:
    training = {"micro_batch": 1}
    alone = run_ranks(uneven_gradients, 1, {"alone": Case("alone", training=training).job()})[0]["alone"]
    jobs = {f"zero{zero}": Case("split", 2, {"zero": zero}, training).job() for zero in range(4)}
    by_rank = run_ranks(uneven_gradients, 2, jobs)
    for found in by_rank:
        for name in jobs:
            assert found[name]["tokens"] == alone["tokens"]
            assert found[name]["loss"] == pytest.approx(alone["loss"], rel=1e-13)
            if found is not by_rank[0]:
                continue  # whole gradients are put together on the first rank
            error, parameter = gradient_error(found[name]["gradients"], alone["gradients"])
            assert error <= 1e-12, (name, parameter)


def test_a_batch_with_nothing_to_predict_moves_nothing() -> None:
    job = Case("silent", optimizer={"weight_decay": 0.0}, spec=SPEC).job()
    built = build(job, torch.device("cpu"))
    before = [master.detach().clone() for master in built.weights.masters]
    with batches(job, built) as loader:
        given = [replace(b, targets=torch.full_like(b.targets, NOT_SCORED), valid=0) for b in next(loader)]
    result = built.step(given, 1e-2, 1)
    assert (result.loss, result.grad_norm) == (0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, built.weights.masters, strict=True))
