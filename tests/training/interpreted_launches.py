"""Kernels that take many tensors in one launch, run on a CPU by Triton's interpreter.

A program of its own: the interpreter is switched on for a whole process, before Triton is imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config import Optimizer as Settings
from fivefold.training import launches
from fivefold.training.squares import sum_of_squares
from fivefold.training.updates import operations, together
from fivefold.training.updates.operations import Numbers, Operands
from fivefold.training.updates.places import Places
from tests.training.updates.interpreted import DTYPES, STRANGE, assert_same_bits

CHUNK = launches.CHUNK
SIZES = st.lists(
    st.sampled_from([1, 5, 1023, 1024, 1025, 2048, 5000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7]),
    min_size=1,
    max_size=4,
)


def drawn(sizes: list[int], dtype: torch.dtype, seed: int, apart: int) -> list[torch.Tensor]:
    """Tensors of these sizes; each begins `apart` elements behind where memory was given out."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size + apart, generator=generator).to(dtype)[apart:] for size in sizes]


@given(
    sizes=SIZES,
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4),
    shared=st.booleans(),
    apart=st.sampled_from([0, 1, 8]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=15)
def squares(sizes: list[int], dtypes: list[torch.dtype], shared: bool, apart: int, seed: int) -> None:
    each = [drawn([size], dtype, seed, apart)[0] for size, dtype in zip(sizes, dtypes, strict=False)]
    each.insert(1, torch.empty(0))
    shares = (
        torch.rand(len(each), dtype=torch.float64) if shared else torch.ones(len(each), dtype=torch.float64)
    )
    found = sum_of_squares(each, shares if shared else None)
    exact = sum(share * x.double().square().sum() for share, x in zip(shares, each, strict=True))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0.0)
    wide = [x.float() for x in each]
    torch.testing.assert_close(sum_of_squares(wide, shares if shared else None), found, rtol=1e-15, atol=0.0)


def squares_of_what_is_not_finite() -> None:
    for value in (torch.inf, torch.nan, 3e38):
        for size in (3, 3000):
            x = torch.ones(size)
            x[size // 2] = value
            assert not sum_of_squares([torch.ones(7), x], None).isfinite()


def a_turned_gradient() -> None:
    x = torch.randn((70, 50)).t()
    torch.testing.assert_close(sum_of_squares([x], None).float(), x.square().sum())


@given(
    sizes=SIZES,
    gradients=st.sampled_from(DTYPES),
    copy=st.sampled_from([None, torch.float16, torch.bfloat16]),
    scaled=st.booleans(),
    apart=st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=10)
def updates(sizes: list[int], gradients: torch.dtype, copy: Any, scaled: bool, apart: int, seed: int) -> None:
    """Some decay, some do not, one has a gradient in another dtype, one counts otherwise, one is empty."""
    given = [
        drawn([size] * 4, torch.float32, seed + number, apart) for number, size in enumerate([*sizes, 0])
    ]
    numbers = [
        Numbers.of(Settings(eps=1e-6), 1e-2, 0.3 * (number % 2), 3 + (number == 3))
        for number in range(len(given))
    ]
    scale = torch.tensor(0.37) if scaled else None
    assert_agree(given, numbers, gradients, copy, scale)


def assert_agree(
    given: list[list[torch.Tensor]], numbers: list[Numbers], dtype: Any, copy: Any, scale: Any
) -> None:
    results = []
    for ours in (True, False):
        each = []
        for number, (gradient, *values) in enumerate(given):
            master, first, second = (value.clone() for value in values)
            gradient = gradient.to(torch.float32 if number == 2 else dtype)
            computing = None if copy is None else torch.full_like(master, 7.0).to(copy)
            each.append(Operands(gradient, master, (first, second.abs()), computing))
        if ours:
            together.adamw(list(zip(each, numbers, strict=True)), scale)
        else:
            for operands, one in zip(each, numbers, strict=True):
                shape = tuple(operands.master.shape)
                operations.adamw(operands, one, scale, Places.of_slab((0,), shape, shape), (0, 0))
        results.append(each)
    for mine, theirs in zip(*results, strict=True):
        for one, other in zip((mine.master, *mine.moments), (theirs.master, *theirs.moments), strict=True):
            assert_same_bits(one, other)
        if copy == torch.float16:
            assert_same_bits(mine.copy, theirs.copy)  # type: ignore[arg-type]
        elif copy is not None:  # the interpreter cuts bfloat16 off, where a GPU rounds to the nearest
            torch.testing.assert_close(mine.copy, theirs.copy, rtol=2.0**-7, atol=0.0)


def strange_numbers() -> None:
    """Zeros, infinities, NaN, what is too small to be normal, and what overflows."""
    every = torch.tensor(STRANGE)
    one, other = every.repeat(len(every)), every.repeat_interleave(len(every))
    ones = torch.ones(len(one))
    numbers = [Numbers.of(Settings(eps=1e-6), 1e-2, 0.3, 3)]
    for values in ([one, ones, other, ones], [other, ones, one, ones]):
        assert_agree([values], numbers, torch.float32, torch.float16, None)


if __name__ == "__main__":
    squares()
    squares_of_what_is_not_finite()
    a_turned_gradient()
    updates()
    strange_numbers()
    print("the same numbers")
