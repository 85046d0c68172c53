"""Scales, casts and products in 8 bits, and the gradients of a layer that computes with them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fivefold.axes.runtime.fp8_numbers import (
    E4M3,
    E5M2,
    Scaled,
    cast,
    cast_for_both,
    cast_for_left,
    cast_for_right,
    largest,
    largest_both,
    product,
    scale_for,
)
from fivefold.axes.runtime.fp8_product import Fp8Product, Input

FORMATS = {E4M3: (448.0, 2.0**-4, 2.0**-10), E5M2: (57344.0, 2.0**-3, 2.0**-17)}
"""The largest number, the largest relative error of rounding, the largest absolute one of tiny numbers."""

magnitudes = st.floats(min_value=2.0**-133, max_value=2.0**127, allow_subnormal=True, width=32)


def numbers(rows: int, columns: int, seed: int, spread: float = 1.0) -> Tensor:
    """bfloat16, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randn(rows, columns, generator=generator)
    sizes = torch.randn(rows, columns, generator=generator) * spread
    return (signs * sizes.exp2()).bfloat16()


def error_bound(scaled: Scaled, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """By how much each number may be off."""
    _, relative, absolute = FORMATS[dtype]
    return torch.maximum(relative * exact.abs(), absolute / scaled.scale.double())


def back(scaled: Scaled) -> Tensor:
    return scaled.values.double() / scaled.scale.double()


# --- scales ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMATS)
@given(amax=magnitudes)
@settings(deadline=None, max_examples=300)
def test_a_scale_is_the_largest_power_of_two_that_fits(dtype: torch.dtype, amax: float) -> None:
    most = FORMATS[dtype][0]
    scale = float(scale_for(torch.tensor(amax), dtype))
    assert math.frexp(scale)[0] == 0.5
    assert amax * scale <= most
    assert 2 * amax * scale > most or scale == 2.0**126


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_largest_number_of_a_format_is_used(dtype: torch.dtype) -> None:
    most = torch.tensor(FORMATS[dtype][0])
    assert scale_for(most, dtype) == 1
    assert scale_for(most * 1.01, dtype) == 0.5
    assert scale_for(torch.zeros(()), dtype) == 1


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_has_no_scale(bad: float) -> None:
    scales = scale_for(torch.tensor([1.0, bad, 0.0]), E4M3)
    assert scales.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
def test_the_largest_magnitude_hides_nothing(bad: float) -> None:
    x = numbers(4, 32, 0)
    x[1, 3] = bad
    assert not torch.isfinite(largest(x))
    assert torch.isfinite(largest(x, 1)).flatten().tolist() == [True, False, True, True]
    assert int(torch.isfinite(largest(x, 0)).sum()) == 31


# --- casts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("dim", [None, 0, 1])
@given(seed=st.integers(0, 999), exponent=st.integers(-110, 80), spread=st.sampled_from([0.5, 4.0, 9.0]))
@settings(deadline=None, max_examples=60)
def test_a_cast_is_off_by_one_rounding(
    dtype: torch.dtype, dim: int | None, seed: int, exponent: int, spread: float
) -> None:
    """In each number, whatever its size: scaling adds nothing, and nothing saturates."""
    x = (numbers(6, 16, seed, spread).double() * 2.0**exponent).bfloat16()
    x[2] = 0
    x[:, 3] = 0
    scaled = cast(x, scale_for(largest(x, dim), dtype), dtype)
    assert scaled.values.dtype == dtype
    assert torch.isfinite(scaled.values.float()).all()
    assert ((back(scaled) - x.double()).abs() <= error_bound(scaled, x.double(), dtype)).all()
    assert not back(scaled)[2].any()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("rowwise", [False, True])
def test_casts_for_either_side_of_a_product_are_the_same_numbers(dtype: torch.dtype, rowwise: bool) -> None:
    """Row by row in memory, or column by column, as kernels for products want them."""
    x = numbers(48, 32, 1, 3.0)
    by_rows, by_columns = largest_both(x) if rowwise else [largest(x)] * 2
    assert torch.equal(by_rows, largest(x, 1 if rowwise else None))
    assert torch.equal(by_columns, largest(x, 0 if rowwise else None))
    of_rows, of_columns = scale_for(by_rows, dtype), scale_for(by_columns, dtype)
    left, right = cast_for_both(x, of_rows, of_columns, dtype)
    pairs = ((left, of_rows), (cast_for_left(x, of_rows, dtype), of_rows), (right, of_columns))
    for found, scale in (*pairs, (cast_for_right(x, of_columns, dtype), of_columns)):
        expected = cast(x, scale, dtype)
        assert torch.equal(found.values.float(), expected.values.float())
        assert torch.equal(found.scale, expected.scale)
    assert left.values.stride() == (32, 1)
    assert right.values.stride() == (1, 48)


def test_every_row_has_its_own_scale() -> None:
    """So rows of tiny numbers are as precise as others; with one scale for all they would be zeros."""
    x = torch.ones(4, 16, dtype=torch.bfloat16) * torch.tensor([1.0, 1e-9, 1e9, 0.0]).bfloat16()[:, None]
    by_row = back(cast(x, scale_for(largest(x, 1), E4M3), E4M3))
    torch.testing.assert_close(by_row, x.double(), rtol=2.0**-4, atol=0)
    whole = back(cast(x, scale_for(largest(x), E4M3), E4M3))
    assert not whole[0].any()


def test_the_emulation_is_torchs_scaled_product() -> None:
    """On a CPU torch has one as well, which rounds at another place: the same but for that."""
    a, b = numbers(32, 64, 1), numbers(48, 64, 2)
    of_a, of_b = (cast(x, scale_for(largest(x), E4M3), E4M3) for x in (a, b))
    ours = product(of_a, of_b.turned())
    kind = torch.nn.functional.ScalingType.TensorWise
    theirs = torch.nn.functional.scaled_mm(
        *(of_a.values, of_b.values.t(), 1 / of_a.scale, kind, 1 / of_b.scale, kind),
        output_dtype=torch.bfloat16,
    )
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("rowwise", [False, True])
@given(seed=st.integers(0, 999), exponents=st.tuples(st.integers(-30, 30), st.integers(-30, 30)))
@settings(deadline=None, max_examples=40)
def test_a_product_is_exact_but_for_its_casts(rowwise: bool, seed: int, exponents: tuple[int, int]) -> None:
    """Of what went in, in float64, but for one rounding to bfloat16 and the sums in float32."""
    a, b = (numbers(32, 64, seed + i).double() * 2.0**e for i, e in enumerate(exponents))
    of_a = cast(a.bfloat16(), scale_for(largest(a.bfloat16(), 1 if rowwise else None), E4M3), E4M3)
    of_b = cast(b.bfloat16(), scale_for(largest(b.bfloat16(), 1 if rowwise else None), E5M2), E5M2)
    exact = back(of_a) @ back(of_b).t()
    terms = back(of_a).abs() @ back(of_b).abs().t()
    found = product(of_a, of_b.turned())
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 64 * 2.0**-24 * terms).all()


# --- a layer -----------------------------------------------------------------------------------------------


def layer(rowwise: bool, weight: Tensor) -> Fp8Product:
    made = Fp8Product("layer", rowwise, Input(1), None, None)
    made.weight_scale = scale_for(largest(weight), E4M3)
    return made


def one_pass(
    rowwise: bool, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor
) -> tuple[Tensor, ...]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    result = layer(rowwise, weight)(x, weight, bias)
    result.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    return result.detach(), x.grad, weight.grad


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """In float64: to 3 or 2 bits of fraction, after scaling by the largest along `dim`; written otherwise."""
    wide = x.double()
    most, bits = (448.0, 3) if dtype == E4M3 else (57344.0, 2)
    least = -6 if dtype == E4M3 else -14
    amax = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
    scale = torch.where(amax > 0, 2.0 ** torch.floor(torch.log2(most / amax.clamp(min=1e-300))), 1.0)
    scaled = wide * scale
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=2.0**least)))
    step = 2.0 ** (exponent - bits)
    return torch.round(scaled / step) * step / scale


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_forward_and_both_gradients_are_those_products(rowwise: bool, with_bias: bool) -> None:
    """Against float64, with the roundings where they belong, and nothing else but one to bfloat16."""
    x, weight, grad = numbers(48, 32, 1, 3), numbers(16, 32, 2, 3), numbers(48, 16, 3, 3)
    bias = numbers(1, 16, 4)[0] if with_bias else None
    y, of_x, of_weight = one_pass(rowwise, x.view(4, 12, 32), weight, bias, grad.view(4, 12, 16))

    def dim(number: int) -> int | None:
        return number if rowwise else None

    expected = rounded(x, E4M3, dim(1)) @ rounded(weight, E4M3, dim(1)).t()
    if bias is not None:
        expected = expected + bias.double()
    torch.testing.assert_close(y.view(48, 16).double(), expected, rtol=2**-6, atol=1e-4)
    expected = rounded(grad, E5M2, dim(1)) @ rounded(weight, E4M3, dim(0))
    torch.testing.assert_close(of_x.view(48, 32).double(), expected, rtol=2**-6, atol=1e-4)
    expected = rounded(grad, E5M2, dim(0)).t() @ rounded(x, E4M3, dim(0))
    torch.testing.assert_close(of_weight.double(), expected, rtol=2**-6, atol=1e-4)


@pytest.mark.parametrize("rowwise", [False, True])
@given(seed=st.integers(0, 999), exponents=st.tuples(*[st.integers(-20, 20)] * 3))
@settings(deadline=None, max_examples=40)
def test_gradients_are_as_near_as_rounding_allows(
    rowwise: bool, seed: int, exponents: tuple[int, int, int]
) -> None:
    """Each product is off by at most the sum of its terms' magnitudes, times (1 + 2^-4)(1 + u) - 1 of what
    its two factors are rounded by, and what is lost of tiny numbers; then one rounding to bfloat16."""
    sizes = ((64, 32), (48, 32), (64, 48))
    x, weight, grad = (
        (numbers(*size, seed + i).double() * 2.0**e).bfloat16()
        for i, (size, e) in enumerate(zip(sizes, exponents, strict=True))
    )
    found = one_pass(rowwise, x, weight, None, grad)
    pairs = ((x, weight.t(), 2.0**-4), (grad, weight, 2.0**-3), (grad.t(), x, 2.0**-3))
    for result, (a, b, unit) in zip(found, pairs, strict=True):
        a, b = a.double(), b.double()
        bound = ((1 + unit) * (1 + 2.0**-4) - 1) * (a.abs() @ b.abs())
        tiny = a.shape[1] * 2.0**-17 * a.abs().max() * b.abs().max()
        exact = a @ b
        assert ((result.double() - exact).abs() <= 1.01 * (bound + tiny) + 2.0**-8 * exact.abs()).all()


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("where", ["x", "weight", "grad"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_comes_out_not_finite(rowwise: bool, where: str, bad: float) -> None:
    given = {"x": numbers(16, 32, 1), "weight": numbers(16, 32, 2), "grad": numbers(16, 16, 3)}
    given[where][3, 5] = bad
    y, of_x, of_weight = one_pass(rowwise, given["x"], given["weight"], None, given["grad"])
    spoilt = {"x": (y, of_weight), "weight": (y, of_x), "grad": (of_x, of_weight)}[where]
    assert all(not torch.isfinite(tensor).all() for tensor in spoilt)


@pytest.mark.parametrize("rowwise", [False, True])
def test_backward_keeps_its_input_in_8_bits(rowwise: bool) -> None:
    kept: list[Tensor] = []
    x, weight = numbers(64, 32, 1).requires_grad_(), numbers(16, 32, 2).requires_grad_()
    made = layer(rowwise, weight)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        made(x, weight)
    of_weight = weight.data_ptr(), made.weight_scale.data_ptr()
    of_input = [t for t in kept if t.data_ptr() not in of_weight]
    scales = 32 * 4 if rowwise else 4
    assert sum(t.numel() * t.element_size() for t in of_input) == 64 * 32 + scales


@pytest.mark.parametrize("rowwise", [False, True])
def test_layers_that_read_one_input_share_its_cast(rowwise: bool) -> None:
    kept: list[Tensor] = []
    x, reads = numbers(64, 32, 1).requires_grad_(), Input(2)
    weights = [numbers(16, 32, 2 + i).requires_grad_() for i in range(2)]
    layers = [Fp8Product("layer", rowwise, reads, None, None) for _ in weights]
    for each, weight in zip(layers, weights, strict=True):
        each.weight_scale = scale_for(largest(weight), E4M3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        results = [each(x, weight) for each, weight in zip(layers, weights, strict=True)]
    assert len({t.data_ptr() for t in kept if t.dtype == E4M3}) == 1
    assert reads.x is None
    assert reads.casts is None
    sum(result.sum() for result in results).backward()  # type: ignore[union-attr]
    for each, weight in zip(layers, weights, strict=True):
        alone = layer(rowwise, weight)
        assert weight.grad is not None
        expected = one_pass(rowwise, x.detach(), weight.detach(), None, torch.ones(64, 16).bfloat16())[2]
        assert torch.equal(weight.grad, expected)
        assert each is not alone
