"""The gradient norm of a GPU: one pass over all gradients, whatever their width."""

from __future__ import annotations

import pytest
import torch

from fivefold.training.norm import local_norm, shared_square

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = ((1,), (999,), (1024, 3), (0,), (257, 1000), (1 << 20,), (3, 70, 400))


def gradients(dtype: torch.dtype, apart: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    found = []
    for shape in SIZES:
        size = torch.Size(shape).numel()
        drawn = torch.randn(size + apart, generator=generator, device="cuda").bfloat16()
        found.append(drawn.to(dtype)[apart:].view(shape))
    return found


@pytest.mark.parametrize("apart", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_is_that_of_float64(dtype: torch.dtype, apart: int) -> None:
    some = gradients(dtype, apart)
    exact = torch.cat([each.double().flatten() for each in some]).norm()
    found = local_norm(some)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=2e-7, atol=0.0)


def test_it_does_not_depend_on_the_width_and_is_the_same_each_time() -> None:
    narrow, wide = gradients(torch.bfloat16), gradients(torch.float32)
    mixed = [
        one if number % 2 else other for number, (one, other) in enumerate(zip(narrow, wide, strict=True))
    ]
    found = [local_norm(each) for each in (narrow, wide, mixed, narrow)]
    assert len({each.item() for each in found}) == 1


def test_ranks_share_the_squares_of_what_they_hold_together() -> None:
    some = gradients(torch.bfloat16)
    shares = torch.rand(len(some), dtype=torch.float64, device="cuda")
    exact = sum(share * each.double().square().sum() for share, each in zip(shares, some, strict=True))
    torch.testing.assert_close(shared_square(some, shares), exact, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 3e38])
def test_what_is_not_finite_or_overflows_shows(value: float) -> None:
    some = gradients(torch.bfloat16)
    some[4][100, 7] = value
    assert not local_norm(some).isfinite()
