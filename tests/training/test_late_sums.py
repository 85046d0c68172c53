"""Gradients that are summed once a step: added up in the dtype they are kept in, however it is computed."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fivefold.comm.world import World
from fivefold.models.inventory import EMBEDDING
from fivefold.training.ranks import run_ranks
from tests.cases import TIED, Case, built_on_cpu

CASES = {
    f"{name} {precision}": Case(name, 2, layout, {"precision": precision, "micro_batch": 2}, spec=TIED)
    for name, layout in (
        ("tied, two ranks", {"pp": 2}),
        ("tied, one rank", {"pp": 2, "schedule": "zbv"}),
        ("tp", {"tp": 2}),
    )
    for precision in ("bf16", "fp32", "fp64")
}
Sums = dict[str, tuple[torch.Tensor, torch.Tensor, bool]]


def late(world: World, name: str) -> Sums:
    """By parameter (and its number, where one is there twice): the gradient before and after, if partial."""
    built = built_on_cpu(CASES[name].job())
    generator = torch.Generator().manual_seed(world.rank)
    masters = built.weights.masters
    gradients = [torch.randn(m.shape, generator=generator, dtype=torch.float64).to(m.dtype) for m in masters]
    before = [gradient.clone() for gradient in gradients]
    built.step.late(gradients)
    return {
        f"{number} {piece.name}": (old, new, piece.partial or piece.shared)
        for number, (piece, old, new) in enumerate(zip(built.step.pieces, before, gradients, strict=True))
    }


def of_all(world: World) -> dict[str, Sums]:
    return {name: late(world, name) for name in CASES}


@cache
def by_rank() -> list[dict[str, Sums]]:
    return run_ranks(of_all, 2)


@pytest.mark.parametrize("name", CASES)
def test_sums_are_exact_to_the_last_bit_of_the_masters(name: str) -> None:
    first, last = (found[name] for found in by_rank())
    assert any(summed for _, _, summed in first.values())
    if "tp" in name:
        pairs = [(first[key], last[key]) for key in first if first[key][2]]
    else:
        mine, other = ([found[key] for key in found if EMBEDDING in key] for found in (first, last))
        pairs = [(mine[0], other[0])] if other else [(mine[0], mine[1])]
    for (one, one_after, _), (two, two_after, _) in pairs:
        assert one_after.dtype == (torch.float64 if "fp64" in name else torch.float32)
        assert torch.equal(one_after, one + two)
        assert torch.equal(two_after, one + two)
    for before, after, summed in (*first.values(), *last.values()):
        assert summed or torch.equal(before, after)
