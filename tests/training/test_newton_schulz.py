"""Newton-Schulz by properties, against a decomposition, and against torch's own Muon."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fivefold.training.updates.newton_schulz import COEFFICIENTS, orthogonalised

SIDES = st.integers(1, 24)
SEEDS = st.integers(0, 10_000)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mapped(values: Tensor) -> Tensor:
    """What becomes of singular values in five steps."""
    first, third, fifth = COEFFICIENTS
    for _ in range(5):
        values = first * values + third * values**3 + fifth * values**5
    return values


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 3), SIDES, SIDES, st.floats(1e-3, 1e3))
def test_singular_vectors_stay_and_values_are_mapped(
    seed: int, batch: int, rows: int, columns: int, size: float
) -> None:
    matrices = drawn(seed, batch, rows, columns)
    found = orthogonalised(size * matrices)
    for matrix, result in zip(matrices, found, strict=True):
        left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
        torch.testing.assert_close(result, left * mapped(values) @ right, rtol=1e-9, atol=1e-11)
        large = values > 2e-3
        after = torch.linalg.svdvals(result)[: int(large.sum())]
        # Those of all that were large enough: none of the others became larger than these may be.
        assert after.numel() == 0 or (after > 0.68).all()
        assert (torch.linalg.svdvals(result) < 1.21).all()


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 5), SIDES, SIDES)
def test_a_batch_is_its_matrices_one_by_one_and_transposes_go_along(
    seed: int, batch: int, rows: int, columns: int
) -> None:
    matrices = drawn(seed, batch, rows, columns)
    together = orthogonalised(matrices.clone())
    for matrix, result in zip(matrices, together, strict=True):
        torch.testing.assert_close(result, orthogonalised(matrix[None].clone())[0], rtol=1e-10, atol=1e-12)
    transposed = orthogonalised(matrices.mT.contiguous()).mT
    torch.testing.assert_close(together, transposed, rtol=1e-9, atol=1e-11)


def test_zeros_stay_zeros() -> None:
    assert not orthogonalised(torch.zeros(2, 3, 4)).any()


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_16_bits_are_enough(shape: tuple[int, int]) -> None:
    matrices = drawn(0, 3, *shape)
    found = torch.linalg.svdvals(orthogonalised(matrices.bfloat16()).double())
    before = torch.linalg.svdvals(matrices) / matrices.norm(dim=(1, 2))[:, None]
    assert found.max() < 1.3
    assert found[before > 0.02].min() > 0.6


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_a_step_is_that_of_torch(shape: tuple[int, int]) -> None:
    """Which rounds to 16 bits in other places: the steps have one direction and one length."""
    gradients = [drawn(seed, *shape).float() for seed in range(3)]
    weight = drawn(9, *shape).float()
    theirs = torch.nn.Parameter(weight.clone())
    settings: dict[str, Any] = {
        "lr": 0.01,
        "weight_decay": 0.3,
        "momentum": 0.75,
        "adjust_lr_fn": "match_rms_adamw",
    }
    plain = torch.optim.Muon([theirs], **settings)
    momentum, mine = torch.zeros(shape), weight.clone()
    for gradient in gradients:
        theirs.grad = gradient.clone()
        plain.step()
        momentum = 0.75 * momentum + gradient
        step = orthogonalised((gradient + 0.75 * momentum).bfloat16()[None])[0]
        mine = mine - 0.01 * 0.3 * mine - 0.01 * 0.2 * math.sqrt(max(shape)) * step
    moved, other = mine - weight, theirs.detach() - weight
    assert float((moved - other).norm() / other.norm()) < 0.02
