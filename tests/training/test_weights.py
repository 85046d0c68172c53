"""Master weights in 16-bit training: nothing between model and optimizer is rounded that need not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fivefold.training.build import Built, build
from tests.cases import SPEC, Case, batches

SMALL = SPEC | {"layers": 1}
HALVES = pytest.mark.parametrize("precision", ["bf16", "fp16"])


def built_in(precision: str, **optimizer: Any) -> Built:
    training = {"precision": precision, "micro_batch": 1, "clip": 0.0}
    job = Case("small", training=training, optimizer=optimizer, spec=SMALL).job()
    return build(job, torch.device("cpu"))


@HALVES
def test_masters_have_the_initial_weights_unrounded(precision: str) -> None:
    exact = build(Case("exact", training={"precision": "fp32"}, spec=SMALL).job(), torch.device("cpu"))
    built = built_in(precision)
    for ours, theirs, computing in zip(
        built.weights.masters, exact.weights.masters, built.model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
        assert torch.equal(computing, ours.to(computing.dtype))


@HALVES
def test_updates_too_small_for_the_model_add_up_in_the_masters(precision: str) -> None:
    built = built_in(precision, name="sgd", momentum=0.0, weight_decay=0.0)
    before = [master.detach().clone() for master in built.weights.masters]
    for _ in range(64):
        for master in built.weights.masters:
            master.grad = torch.ones_like(master)
        built.optimizer.step(2.0**-16)
    for old, new, computing in zip(before, built.weights.masters, built.model.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old - 2.0**-10, rtol=0.0, atol=2.0**-18)
        assert torch.equal(computing, new.to(computing.dtype))


@HALVES
def test_gradients_of_micro_batches_are_added_up_in_float32(precision: str) -> None:
    built = built_in(precision)
    with batches(built.job, built) as loader:
        given = next(loader)
    assert len(given) == 8
    expected = [torch.zeros_like(master) for master in built.weights.masters]
    for batch in given:
        built.step.backward([batch], 100)
        for total, gradient in zip(expected, built.step.collect(), strict=True):
            total += gradient
        built.weights.clear_gradients()
    built.step.backward(given, 100)
    for gradient, total in zip(built.step.collect(), expected, strict=True):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, total)
