"""The gradient norm and clipping: torch's own bit for bit on one process, the same number when sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.training.build import build
from fivefold.training.norm import clip, local_norm
from fivefold.training.ranks import run_ranks
from tests.cases import SPEC, TIED, Case, batches

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=6)


@given(
    shapes=SHAPES,
    size=st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
    limit=st.sampled_from([1e-3, 1.0, 1e3]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None)
def test_one_process_computes_what_torch_does_to_the_last_bit(
    shapes: list[list[int]], size: float, limit: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(shape, generator=generator, dtype=dtype) * size for shape in shapes]
    theirs = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]
    for parameter, gradient in zip(theirs, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs, limit)
    norm = local_norm(gradients)
    assert torch.equal(norm, expected)
    clip(gradients, norm, limit)
    for gradient, parameter in zip(gradients, theirs, strict=True):
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


ONE_ROW = SPEC | {"dim": 8, "heads": 8, "kv_heads": 4, "positions": "learned", "qk_norm": True}
CASES = {
    f"{name} zero{zero}": Case(name, 2, {"zero": zero}, spec=spec)
    for name, spec in (("untied", SPEC), ("tied", TIED), ("empty shards", ONE_ROW))
    for zero in range(4)
}


def norms(world: World, jobs: dict[str, Job]) -> dict[str, Any]:
    """The norm of one step, and every whole gradient before and after clipping to half of it."""
    found = {}
    for name, job in jobs.items():
        built = build(job, world.device)
        with batches(job, built) as loader:
            micro_batches = next(loader)
        loss = built.step.backward(micro_batches, built.step.count_tokens(micro_batches))
        gradients = built.step.collect()
        _, norm = built.step.totals(loss, gradients)
        before = built.weights.whole(gradients)
        clip(gradients, norm, norm.item() / 2)
        found[name] = (norm, before, built.weights.whole(gradients))
    return found


def test_the_norm_of_shards_is_the_norm_of_the_whole() -> None:
    by_rank = run_ranks(norms, 2, {name: case.job() for name, case in CASES.items()})
    for name in CASES:
        norm, before, after = by_rank[0][name]
        assert norm > 0
        assert torch.equal(norm, by_rank[1][name][0]), "every rank must clip alike"
        flat = torch.cat([gradient.flatten() for gradient in before.values()])
        assert norm.item() == pytest.approx(flat.norm().item(), rel=1e-13), name
        for parameter, gradient in before.items():
            torch.testing.assert_close(after[parameter], gradient / 2, rtol=1e-5, atol=0.0, msg=parameter)
