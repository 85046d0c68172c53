"""The grouped matrix product on a GPU against the loop over experts. Skipped without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fivefold.models import grouped
from fivefold.models.grouped import grouped_linear, has_grouped_kernel
from fivefold.models.moe import Moe
from fivefold.models.spec import ModelSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SPEC = ModelSpec(
    vocab_size=512, dim=256, layers=1, heads=4, ffn=384, max_seq_len=512, experts=8, experts_per_token=2
)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def results(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, mix: Tensor) -> list[Tensor]:
    """The product and its derivatives."""
    leaves = [leaf.detach().requires_grad_() for leaf in (rows, weight, bias) if leaf is not None]
    product = grouped_linear(leaves[0], leaves[1], None if bias is None else leaves[2], counts)
    return [product.detach(), *torch.autograd.grad(product, leaves, mix)]


@pytest.mark.parametrize(
    "counts",
    [[64, 64, 64, 64], [100, 0, 27, 129], [0, 0, 0, 256], [0, 255, 1, 0], [1, 3, 5, 247]],
)
@pytest.mark.parametrize("biased", [False, True])
def test_the_kernel_is_the_loop(counts: list[int], biased: bool, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    rows, weight = torch.randn(256, 96, **options), torch.randn(4, 64, 96, **options)
    bias = torch.randn(4, 64, **options) if biased else None
    number, mix = torch.tensor(counts, device="cuda"), torch.randn(256, 64, **options)
    assert has_grouped_kernel(rows, weight)
    kernel = results(rows, weight, bias, number, mix)
    exact = results(
        rows.double(), weight.double(), None if bias is None else bias.double(), number, mix.double()
    )
    monkeypatch.setattr(grouped, "has_grouped_kernel", lambda rows, weight: False)
    loop = results(rows, weight, bias, number, mix)
    for by_kernel, by_loop, truth in zip(kernel, loop, exact, strict=True):
        assert by_kernel.shape == truth.shape
        assert relative_error(by_kernel, truth) <= 2 * relative_error(by_loop, truth) + 1e-4
    empty = [group for group, count in enumerate(counts) if count == 0]
    assert kernel[2][empty].count_nonzero() == 0


def trained(moe: Moe, x: Tensor, recompute: bool = False) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    result = checkpoint(moe, x, use_reentrant=False) if recompute else moe(x)
    found = torch.autograd.grad(result.square().mean(), [x, *moe.parameters()])
    return dict(zip(["x", *dict(moe.named_parameters())], found, strict=True)) | {"result": result.detach()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fields", [{}, {"mlp_bias": True, "shared_experts": 1}])
def test_a_whole_layer(fields: dict[str, Any], recompute: bool, monkeypatch: pytest.MonkeyPatch):
    """In bfloat16 by the kernel, as near to float64 as by the loop."""
    torch.manual_seed(0)
    moe = Moe(SPEC.model_copy(update=fields)).to("cuda", torch.bfloat16)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    moe.balance_weight = 0.01
    x = torch.randn(4, 128, SPEC.dim, device="cuda", dtype=torch.bfloat16)
    kernel = trained(moe, x, recompute)
    monkeypatch.setattr(grouped, "has_grouped_kernel", lambda rows, weight: False)
    loop = trained(moe, x)
    exact = trained(moe.double(), x.double())
    assert moe.routed.sum() == 3 * 4 * 128 * 2
    for name, truth in exact.items():
        assert relative_error(kernel[name], truth) <= 2 * relative_error(loop[name], truth) + 1e-3, name


def test_the_layer_is_deterministic():
    torch.manual_seed(0)
    moe = Moe(SPEC).to("cuda", torch.bfloat16)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    x = torch.randn(4, 128, SPEC.dim, device="cuda", dtype=torch.bfloat16)
    first = trained(moe, x)
    for _ in range(3):
        assert all(torch.equal(value, first[name]) for name, value in trained(moe, x).items())


@pytest.mark.parametrize(
    ("dtype", "width", "kernel"),
    [
        (torch.bfloat16, 64, True),
        (torch.bfloat16, 60, False),
        (torch.float16, 64, False),
        (torch.float32, 64, False),
    ],
)
def test_what_the_kernel_cannot_do_the_loop_does(dtype: torch.dtype, width: int, kernel: bool):
    rows = torch.randn(10, width, device="cuda", dtype=dtype)
    weight = torch.randn(2, 16, width, device="cuda", dtype=dtype)
    assert has_grouped_kernel(rows, weight) == kernel
    found = grouped_linear(rows, weight, None, torch.tensor([4, 6], device="cuda"))
    expected = torch.cat([rows[:4].double() @ weight[0].double().T, rows[4:].double() @ weight[1].double().T])
    assert relative_error(found, expected) < 1e-2
