"""Products in 8 bits by a GPU's kernels: as the emulation on a CPU computes them."""

from __future__ import annotations

import pytest
import torch

from fivefold.axes.runtime.fp8_numbers import E4M3, E5M2, cast, largest, product, scale_for

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with fp8"
)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_gpu_multiplies_what_the_emulation_does(rowwise: bool, dtype: torch.dtype) -> None:
    """Casts bit for bit; products but for sums in another order, and one rounding to bfloat16."""
    torch.manual_seed(0)
    dim = 1 if rowwise else None
    a, b = torch.randn(64, 128).bfloat16(), torch.randn(96, 128).bfloat16()
    here = [cast(x, scale_for(largest(x, dim), kind), kind) for x, kind in ((a, dtype), (b, E4M3))]
    there = [
        cast(x, scale_for(largest(x, dim), kind), kind) for x, kind in ((a.cuda(), dtype), (b.cuda(), E4M3))
    ]
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.scale, other.scale.cpu())
        assert torch.equal(one.values.view(torch.uint8), other.values.cpu().view(torch.uint8))
    expected, found = product(here[0], here[1].turned()), product(there[0], there[1].turned())
    torch.testing.assert_close(found.cpu(), expected, rtol=2**-6, atol=2**-6)
