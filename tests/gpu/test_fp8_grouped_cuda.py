"""Products of experts in 8 bits by a GPU's kernel: as the emulation on a CPU computes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.axes.runtime.fp8_grouped import GroupedProduct
from fivefold.axes.runtime.fp8_numbers import E4M3, largest, scale_for
from fivefold.axes.runtime.fp8_product import Input
from fivefold.training.preflight import GROUPS_IN_FP8

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() not in GROUPS_IN_FP8,
    reason="no GPU with a kernel for groups in fp8",
)

IN, OUT, EXPERTS = 96, 64, 4


def one_pass(rowwise: bool, counts: list[int], device: str) -> list[Tensor]:
    """The product and both gradients, of numbers that are the same on every device."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(counts), IN), (EXPERTS, OUT, IN), (sum(counts), OUT))
    rows, weight, grad = (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)
    layer = GroupedProduct("layer", rowwise, Input(1), None, None).to(device)
    layer.weight_scale = scale_for(largest(weight.view(-1, IN)), E4M3)
    leaves = rows.requires_grad_(), weight.requires_grad_()
    result = layer(*leaves, None, torch.tensor(counts, device=device))
    return [t.cpu() for t in (result.detach(), *torch.autograd.grad(result, leaves, grad))]


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize(
    "counts",
    [[64, 64, 64, 64], [100, 0, 27, 129], [0, 0, 0, 256], [0, 255, 1, 0], [1, 3, 5, 8], [0, 0, 0, 0]],
)
def test_a_gpu_multiplies_what_the_emulation_does(rowwise: bool, counts: list[int]) -> None:
    """But for sums in another order, and one rounding to bfloat16."""
    for found, expected in zip(
        one_pass(rowwise, counts, "cuda"), one_pass(rowwise, counts, "cpu"), strict=True
    ):
        assert found.shape == expected.shape
        # Hopper's tensor cores keep 14 bits of a sum of products in 8 bits.
        torch.testing.assert_close(
            found, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().amax()) if expected.numel() else 0
        )
    empty = [group for group, count in enumerate(counts) if not count]
    assert not one_pass(rowwise, counts, "cuda")[2][empty].any()


@pytest.mark.parametrize("rowwise", [False, True])
def test_it_is_deterministic(rowwise: bool) -> None:
    first, again = (one_pass(rowwise, [100, 0, 27, 129], "cuda") for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
