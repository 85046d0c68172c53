"""Products of experts in 8 bits, with their gradients: by the emulation, and what a GPU's kernel is given."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fivefold.axes.runtime import fp8_grouped
from fivefold.axes.runtime.fp8_grouped import (
    GroupedProduct,
    filled_up,
    scaled_group_product,
    scaled_group_sums,
)
from fivefold.axes.runtime.fp8_numbers import E4M3, largest, scale_for
from fivefold.axes.runtime.fp8_product import Input
from tests.axes.test_fp8_numbers import numbers, rounded

IN, OUT = 48, 32
COUNTS = ([20, 0, 5, 39], [0, 0, 0, 64], [16, 16, 16, 16], [64, 0, 0, 0])
group_sizes = st.lists(st.sampled_from([0, 0, 1, 15, 16, 17, 40]), min_size=1, max_size=6)


def stacked(experts: int, seed: int, spread: float = 3.0) -> Tensor:
    """Weights [E, out, in]."""
    return numbers(experts * OUT, IN, seed, spread).view(experts, OUT, IN)


def layer(rowwise: bool, weight: Tensor, reads: Input | None = None) -> GroupedProduct:
    made = GroupedProduct("layer", rowwise, reads or Input(1), None, None)
    made.weight_scale = scale_for(largest(weight.view(-1, IN)), E4M3)
    return made


def one_pass(
    rowwise: bool, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int], grad: Tensor
) -> list[Tensor]:
    """The product, and the gradients of rows, weight and bias."""
    leaves = [leaf.clone().requires_grad_() for leaf in (rows, weight, bias) if leaf is not None]
    result = layer(rowwise, weight)(leaves[0], leaves[1], (*leaves, None)[2], torch.tensor(counts))
    return [result.detach(), *torch.autograd.grad(result, leaves, grad)]


# --- against the formula -----------------------------------------------------------------------------------


def near(found: Tensor, exact: Tensor, terms: Tensor, length: int) -> bool:
    """But for one rounding to bfloat16, and the order of sums of so many terms in float32."""
    assert found.dtype == torch.bfloat16
    bound = 1.01 * 2.0**-8 * exact.abs() + length * 2.0**-24 * terms
    return bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
def test_forward_and_both_gradients_are_each_groups_products(rowwise: bool, counts: list[int]) -> None:
    """In float64 from the same casts, written otherwise: exact but for how it is summed and given."""
    rows, weight, grad = numbers(64, IN, 1, 3), stacked(4, 2), numbers(64, OUT, 3, 3)
    y, of_rows, of_weight = one_pass(rowwise, rows, weight, None, counts, grad)

    def whole(x: Tensor, dim: int) -> Tensor:
        return rounded(x, E4M3, dim if rowwise else None)

    by_row, by_column = whole(rows, 1), whole(weight.view(-1, IN), 1).view_as(weight)
    columns = torch.stack([whole(w, 0) for w in weight]) if rowwise else by_column
    pieces = zip(by_row.split(counts), by_column, whole(grad, 1).split(counts), columns, strict=True)
    start = 0
    for group, (x, w, g, turned) in enumerate(pieces):
        end = start + len(x)
        assert near(y[start:end], x @ w.t(), x.abs() @ w.t().abs(), IN)
        assert near(of_rows[start:end], g @ turned, g.abs() @ turned.abs(), OUT)
        if len(x) and rowwise:
            x, g = (whole(each[start:end], 0) for each in (rows, grad))
        assert near(of_weight[group], g.t() @ x, g.t().abs() @ x.abs(), 64)
        start = end
    assert not of_weight[[group for group, count in enumerate(counts) if not count]].any()


@pytest.mark.parametrize("rowwise", [False, True])
@given(
    seed=st.integers(0, 999),
    counts=group_sizes,
    exponents=st.tuples(*[st.integers(-20, 20)] * 3),
)
@settings(deadline=None, max_examples=40)
def test_gradients_are_as_near_as_rounding_allows(
    rowwise: bool, seed: int, counts: list[int], exponents: tuple[int, int, int]
) -> None:
    """Every product is off by at most what its two factors are rounded by, and what is lost of tiny numbers;
    then by one rounding to bfloat16."""
    n = sum(counts)
    shapes = ((n, IN), (len(counts) * OUT, IN), (n, OUT))
    rows, weight, grad = (
        (numbers(*shape, seed + i).double() * 2.0**e).bfloat16()
        for i, (shape, e) in enumerate(zip(shapes, exponents, strict=True))
    )
    weight = weight.view(-1, OUT, IN)
    y, of_rows, of_weight = one_pass(rowwise, rows, weight, None, counts, grad)
    a, w, g = (each.double() for each in (rows, weight, grad))
    for group, (x, m, d) in enumerate(zip(a.split(counts), w, g.split(counts), strict=True)):
        start = sum(counts[:group])
        end = start + counts[group]
        for found, left, right, of_left, of_right in (
            (y[start:end], x, m.t(), a, w),
            (of_rows[start:end], d, m, g, w),
            (of_weight[group], d.t(), x, g, a),
        ):
            exact, terms = left @ right, left.abs() @ right.abs()
            most = of_left.abs().max() * of_right.abs().max() if left.numel() else 0.0
            bound = 1.01 * ((1 + 2.0**-4) ** 2 - 1) * terms + 2.0**-16 * left.shape[1] * most
            assert ((found.double() - exact).abs() <= bound + 2.0**-8 * exact.abs()).all()


@pytest.mark.parametrize("rowwise", [False, True])
def test_a_bias_is_added_to_the_rows_of_its_expert(rowwise: bool) -> None:
    counts = COUNTS[0]
    rows, weight, grad = numbers(64, IN, 1), stacked(4, 2), numbers(64, OUT, 3)
    bias = numbers(4, OUT, 4)
    without = one_pass(rowwise, rows, weight, None, counts, grad)
    y, *gradients, of_bias = one_pass(rowwise, rows, weight, bias, counts, grad)
    assert torch.equal(y, without[0] + bias.repeat_interleave(torch.tensor(counts), 0))
    assert all(torch.equal(one, other) for one, other in zip(gradients, without[1:], strict=True))
    sums = torch.stack([g.double().sum(0) for g in grad.split(counts)])
    torch.testing.assert_close(of_bias.double(), sums, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("rowwise", [False, True])
def test_a_large_number_costs_its_own_row_or_column_of_a_group_alone(rowwise: bool) -> None:
    """Rowwise; with one scale for all, the others are lost."""
    rows, weight, grad = numbers(64, IN, 1), stacked(4, 2, 1), numbers(64, OUT, 3)
    rows[0, 0] = grad[0, 0] = 2.0**40
    _, _, of_weight = one_pass(rowwise, rows, weight, None, [16, 16, 16, 16], grad)
    others = grad[16:].view(3, 16, OUT).double().transpose(1, 2) @ rows[16:].view(3, 16, IN).double()
    lost = float((of_weight[1:].double() - others).norm() / others.norm())
    assert lost < 0.1 if rowwise else lost == 1


@pytest.mark.parametrize("rowwise", [False, True])
def test_no_rows_at_all(rowwise: bool) -> None:
    weight = stacked(3, 1)
    y, of_rows, of_weight = one_pass(rowwise, weight[0, :0], weight, None, [0, 0, 0], weight[0, :0, :OUT])
    assert y.shape == (0, OUT)
    assert of_rows.shape == (0, IN)
    assert of_weight.shape == weight.shape
    assert not of_weight.any()


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("where", ["rows", "weight", "grad"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_comes_out_not_finite(rowwise: bool, where: str, bad: float) -> None:
    given = {"rows": numbers(64, IN, 1), "weight": stacked(4, 2), "grad": numbers(64, OUT, 3)}
    given[where].view(-1, given[where].shape[-1])[3, 5] = bad
    y, of_rows, of_weight = one_pass(rowwise, given["rows"], given["weight"], None, COUNTS[0], given["grad"])
    spoilt = {"rows": (y, of_weight), "weight": (y, of_rows), "grad": (of_rows, of_weight)}[where]
    assert all(not torch.isfinite(tensor).all() for tensor in spoilt)


# --- what is kept ------------------------------------------------------------------------------------------


def kept_by(rowwise: bool) -> tuple[list[Tensor], Input]:
    """What two layers that read the same keep for backward, but for their weights."""
    kept: list[Tensor] = []
    rows, reads, counts = numbers(64, IN, 1).requires_grad_(), Input(2), torch.tensor(COUNTS[0])
    weights = [stacked(4, 2 + i).requires_grad_() for i in range(2)]
    layers = [layer(rowwise, weight, reads) for weight in weights]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        for each, weight in zip(layers, weights, strict=True):
            each(rows, weight, None, counts)
    found = {t.data_ptr(): t for t in kept if t.data_ptr() not in {w.data_ptr() for w in weights}}
    found.pop(counts.data_ptr())
    return list(found.values()), reads


@pytest.mark.parametrize("rowwise", [False, True])
def test_layers_that_read_the_same_rows_keep_one_cast_of_them(rowwise: bool) -> None:
    kept, reads = kept_by(rowwise)
    assert sum(t.nbytes for t in kept) == 64 * IN + 4 * (4 * IN if rowwise else 1)
    assert reads.x is None
    assert reads.casts is None


# --- what a GPU's kernel is given --------------------------------------------------------------------------


def kernel(a: Tensor, inverse_a: Tensor, b: Tensor, inverse_b: Tensor, ends: Tensor) -> Tensor:
    """In place of torch's, with its conditions, as its source has them (torch 2.11 to 2.13)."""
    sums = b.dim() == 2
    assert a.dtype == b.dtype == E4M3
    assert inverse_a.dtype == inverse_b.dtype == torch.float32
    assert ends.dtype == torch.int32
    assert a.stride(-1) == 1, "rows in one piece"
    assert b.stride(-2) == 1, "columns in one piece"
    assert all(size % 16 == 0 for size in (a.shape[-1], *b.shape[-2:]))
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    scale_shapes = ((len(ends) * a.shape[0],), (len(ends) * b.shape[1],))
    assert (tuple(inverse_a.shape), tuple(inverse_b.shape)) == (
        scale_shapes if sums else (a.shape[:1], (len(b), b.shape[2]))
    )
    if sums:
        assert all(size > 0 and size % 16 == 0 for size in sizes)
        used = int(ends[-1])
        assert used <= a.shape[1] == b.shape[0]
        left, right = a[:, :used].float().split(sizes, 1), b[:used].float().split(sizes)
        scales = zip(inverse_a.view(len(ends), -1), inverse_b.view(len(ends), -1), strict=True)
        products = zip(left, right, scales, strict=True)
        return torch.stack([x @ y * u[:, None] * v for x, y, (u, v) in products]).bfloat16()
    assert len(a) == ends[-1]
    groups = zip(a.float().split(sizes), inverse_a.split(sizes), b.float(), inverse_b, strict=True)
    return torch.cat([x @ y * u[:, None] * v for x, u, y, v in groups]).bfloat16()


@pytest.mark.parametrize("rowwise", [False, True])
@given(seed=st.integers(0, 999), counts=group_sizes)
@settings(deadline=None, max_examples=40)
def test_the_kernel_is_given_the_same_products(rowwise: bool, seed: int, counts: list[int]) -> None:
    """As it wants them: groups filled up with zeros, scales of every row and column."""
    rows, grad = numbers(sum(counts), IN, seed, 3), numbers(sum(counts), OUT, seed + 1, 3)
    weight, number = stacked(len(counts), seed + 2), torch.tensor(counts)
    made = layer(rowwise, weight)
    used, kept = made._casts(rows, number)
    by_row = made.gradient_rows(grad)
    by_column = made.gradient_columns(grad, number) if rowwise else by_row
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_grouped, "grouped_kernel", kernel)
        for a, b in ((used, made.weight_rows(weight)), (by_row, made.weight_columns(weight))):
            expected = scaled_group_product(*a, *b, number)
            scales = a.scale.expand(len(rows), 1), b.scale.expand(len(weight), expected.shape[1])
            found = fp8_grouped.product_by_kernel(a.values, scales[0], b.values, scales[1], number)
            torch.testing.assert_close(found, expected)
        expected = scaled_group_sums(*by_column, *kept, number)
        left, right = (x.scale.expand(len(weight), x.values.shape[1]) for x in (by_column, kept))
        found = fp8_grouped.sums_by_kernel(by_column.values, left, kept.values, right, number)
        torch.testing.assert_close(found, expected)


@given(counts=group_sizes)
@settings(deadline=None, max_examples=60)
def test_groups_are_filled_up_to_multiples(counts: list[int]) -> None:
    places, ends, most = filled_up(torch.tensor(counts), sum(counts))
    sizes = [max(16, -(-count // 16) * 16) for count in counts]
    starts = [sum(sizes[:group]) for group in range(len(counts))]
    assert ends.tolist() == [start + size for start, size in zip(starts, sizes, strict=True)]
    expected: list[Any] = [range(start, start + n) for start, n in zip(starts, counts, strict=True)]
    assert places.tolist() == [place for group in expected for place in group]
    assert most % 16 == 0
    assert ends[-1] <= most <= sum(counts) + 16 * len(counts) + 15
