"""The gradient norm and clipping: torch's own bit for bit on one process, the same numbers on any layout."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.comm.compat import scale_each
from fivefold.comm.world import World
from fivefold.training.norm import CLIP_EPSILON, clipping, local_norm
from fivefold.training.ranks import run_ranks
from tests.cases import SPEC, TIED, Case, as_used, batches, built_on_cpu

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
    scale_each(gradients, clipping(norm, limit))
    for gradient, parameter in zip(gradients, theirs, strict=True):
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


ONE_ROW = SPEC | {"dim": 8, "heads": 8, "kv_heads": 4, "positions": "learned", "qk_norm": True}
MOE = SPEC | {"layers": 2, "experts": 4, "experts_per_token": 2}
LIMIT = 0.1
CASES = {
    case.name: case
    for case in (
        Case("zero 0", 2, {"zero": 0}),
        Case("zero 2, empty shards", 2, {"zero": 2}, spec=ONE_ROW),
        Case("zero 3, tied", 2, {"zero": 3}, spec=TIED),
        Case("tp", 2, {"tp": 2}),
        Case("tp, tied", 2, {"tp": 2}, spec=TIED),
        Case("pp", 2, {"pp": 2}),
        Case("pp, tied", 2, {"pp": 2}, spec=TIED),
        Case("cp", 2, {"cp": 2}, {"micro_batch": 2}),
        Case("ep", 2, {"dp_shard": 2, "ep": 2}, spec=MOE),
    )
}


def clipped(case: Case, limit: float) -> dict[str, Any]:
    """What one step tells, and every whole gradient as the optimizer gets it."""
    job = replace(case, training=case.training | {"clip": limit}).job()
    built = built_on_cpu(job)
    found: dict[str, Any] = {}

    def note(lr: float, scale: torch.Tensor | None = None) -> None:
        found["gradients"] = built.weights.whole(as_used(built.weights.collect_gradients(), scale))

    built.optimizer.step = note  # type: ignore[method-assign]
    with batches(job, built) as loader:
        result = built.step(next(loader), 1e-2, 1)
    return found | {"loss": result.loss, "norm": result.grad_norm, "tokens": result.tokens}


def clipped_on_ranks(world: World) -> dict[str, Any]:
    return {name: clipped(case, LIMIT) for name, case in CASES.items()}


@cache
def by_rank() -> list[dict[str, Any]]:
    return run_ranks(clipped_on_ranks, 2)


@cache
def alone(spec: str) -> dict[str, Any]:
    """One process on all of the batch, not clipped."""
    return clipped(Case("alone", spec=json.loads(spec)), 0.0)


@pytest.mark.parametrize("name", CASES)
def test_what_is_clipped_on_any_layout_is_the_gradient_of_one_process(name: str) -> None:
    wanted = alone(json.dumps(CASES[name].spec))
    flat = torch.cat([gradient.flatten() for gradient in wanted["gradients"].values()])
    assert wanted["norm"] == pytest.approx(flat.norm().item(), rel=1e-13)
    assert wanted["norm"] > 2 * LIMIT, "nothing would be clipped"
    for found in (ranks[name] for ranks in by_rank()):
        assert found["tokens"] == wanted["tokens"]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
        assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-11)
    scale = LIMIT / (wanted["norm"] + CLIP_EPSILON)
    gradients = by_rank()[0][name]["gradients"]
    assert gradients.keys() == wanted["gradients"].keys()
    for parameter, gradient in wanted["gradients"].items():
        torch.testing.assert_close(gradients[parameter], gradient * scale, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("share", [0.995, 0.9999, 1.0001, 1.5])
def test_a_limit_close_to_the_norm_clips_as_torch_does(share: float) -> None:
    """Whether it is worth a pass over all gradients is decided by a number that was rounded."""
    plain = alone(json.dumps(SPEC))
    found = clipped(Case("alone"), plain["norm"] * share)
    scale = min(1.0, plain["norm"] * share / (plain["norm"] + CLIP_EPSILON))
    for parameter, gradient in plain["gradients"].items():
        torch.testing.assert_close(found["gradients"][parameter], gradient * scale, rtol=1e-13, atol=0.0)
