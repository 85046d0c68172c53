"""Attention across ranks on the kernels of a GPU. Two processes share the card; messages go over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.axes.runtime import merging, partial_attention
from fivefold.axes.runtime.merging import Part, accumulator
from fivefold.axes.runtime.partial_attention import Block, attend, attend_backward
from fivefold.comm import compat
from fivefold.training.ranks import run_ranks
from tests.axes.test_context import KINDS, attention_errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HEADS = [(8, 8), (8, 2), (4, 1)]
CASES = [(kind, *heads, separate) for kind in KINDS for heads in HEADS for separate in (False, True)]


def complaints(
    dtype: torch.dtype, length: int, width: int, fine: float, ranks: int = 2, cases: Any = CASES
) -> list[str]:
    """Everything that errs more than `fine`, and more than twice as much as plain attention."""
    by_rank = run_ranks(attention_errors, ranks, cases, "cuda:0", dtype, length, width)
    return [
        f"rank {rank}, {case}: {name} is off by {error:.1e}, plain attention by {plain:.1e}"
        for rank, found in enumerate(by_rank)
        for case, errors in zip(cases, found, strict=True)
        for name, error, plain in errors
        if not error <= max(2 * plain, fine)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("length", "width"), [(1024, 128), (520, 64)])  # the second fits no kernel's tiles
def test_kernels_err_little_more_than_plain_attention(dtype: torch.dtype, length: int, width: int) -> None:
    """Of the result and of every gradient, against float64."""
    assert complaints(dtype, length, width, fine=0.0) == []


def test_float32_has_no_kernel_and_is_worked_out_in_tiles() -> None:
    assert complaints(torch.float32, 1040, 32, fine=1e-5) == []


def test_blocks_of_earlier_and_of_later_ranks_too() -> None:
    """Four ranks: those between others attend to gathered blocks of both."""
    cases = [case for case in CASES if case[0] != "ulysses" and case[1:3] == (8, 2)]
    assert complaints(torch.bfloat16, 1024, 128, fine=0.0, ranks=4, cases=cases) == []


def exact(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> list[Tensor]:
    """Result, log-sum-exp and gradients in float64 of queries that are the last of the tokens."""
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    repeats, queries, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    wide = [x.repeat_interleave(repeats, 1) for x in leaves[1:]]
    scores = leaves[0] @ wide[0].transpose(-1, -2) / query.shape[-1] ** 0.5
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=query.device).triu(keys - queries + 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    out = scores.softmax(-1) @ wide[1]
    grads = torch.autograd.grad(out, leaves, grad.double())
    return [out.detach(), scores.logsumexp(-1).detach(), *grads]


def error(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize(
    ("heads", "groups", "queries", "earlier", "width"),
    [(8, 2, 256, 384, 128), (4, 4, 512, 128, 64), (6, 2, 200, 72, 96), (4, 1, 1024, 3072, 128)],
)
def test_two_blocks_put_together_are_one_attention(
    heads: int,
    groups: int,
    queries: int,
    earlier: int,
    width: int,
    kernel: str,
    by_token: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Own keys causally, earlier ones whole; keys and values lie token by token, as ranks exchange them.

    Each block's backward is given the whole result and its log-sum-exp. Each block rounds weights to the
    kernel's numbers, and what it gives once more: together they err by less than a unit of the last place.
    """
    torch.manual_seed(0)
    tokens = torch.randn(earlier + queries, 2, 2, groups, width, device="cuda", dtype=dtype)
    both = torch.randn(2, 2, queries, heads, width, device="cuda", dtype=dtype)
    query, grad = both.transpose(2, 3).unbind()
    if not by_token:
        query = query.contiguous()
    key, value = tokens.permute(1, 2, 3, 0, 4).unbind()
    blocks = [
        Block(query, key[:, :, earlier:], value[:, :, earlier:], True, None),
        Block(query, key[:, :, :earlier], value[:, :, :earlier], False, None),
    ]
    if kernel == "flash":
        monkeypatch.setattr(compat, "has_cudnn_attention", lambda query, key, value: False)
    elif not partial_attention._has_cudnn(blocks[0]):
        pytest.skip("torch prefers another kernel on this GPU")
    out = torch.empty_like(grad)
    lse = merging.put_together([Part(0, *attend(block)) for block in blocks], out)
    assert lse is not None
    found = [attend_backward(block, grad, out, lse) for block in blocks]
    of_query = torch.empty_like(grad)
    merging.put_together([Part(0, grads[0]) for grads in found], of_query)
    of_keys = [torch.cat((found[1][i], found[0][i]), 2) for i in (1, 2)]
    true = exact(query, key, value, grad)
    allowed = torch.finfo(dtype).eps
    assert error(out, true[0]) < allowed
    torch.testing.assert_close(lse.double(), true[1], rtol=1e-4, atol=1e-4)
    for part, whole in zip((of_query, *of_keys), true[2:], strict=True):
        assert error(part, whole) < allowed


@pytest.mark.parametrize("width", [128, 96, 8])
@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_puts_together_what_torch_does(width: int, weighed: bool, dtype: torch.dtype) -> None:
    """Rounded once, to the nearest; parts of the second half; queries that fill no tile; many parts."""
    torch.manual_seed(0)
    rows, heads, half = 2, 3, 133
    parts, held = merging.Parts(), []
    for number, first in enumerate((0, half, 0, half, half, 0, half)):
        queries = 2 * half - first
        value = torch.randn(rows, queries, heads, width, device="cuda").bfloat16().transpose(1, 2)
        value = value.contiguous() if number % 2 else value
        lse = 5 * torch.randn(rows, heads, queries, device="cuda")
        if number:
            lse[:, :, ::7] = -torch.inf
        held.append(Part(first, value, lse if weighed else None))
        parts.add(held[-1])
    out = torch.empty(rows, 2 * half, heads, width, device="cuda", dtype=dtype).transpose(1, 2)
    total = parts.put_into(out)
    true = torch.empty(out.shape, device="cuda", dtype=torch.float64)
    doubled = [Part(n, value.double(), None if lse is None else lse.double()) for n, value, lse in held]
    true_total = merging.by_torch(doubled, true)
    fine = 32 * torch.finfo(accumulator(dtype)).eps * true.abs().max()
    allowed = torch.finfo(dtype).eps / 2 * true.abs() + fine
    assert bool(((out.double() - true).abs() <= allowed).all())
    if total is not None and true_total is not None:
        torch.testing.assert_close(total.double(), true_total, rtol=1e-6, atol=1e-6)
