"""The kernel of AdamW against torch's operations, bit for bit, run on a CPU by Triton's interpreter.

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
from fivefold.training.updates import kernels, operations
from fivefold.training.updates.moments import CODES, narrowed
from fivefold.training.updates.operations import Numbers, Operands, adamw
from fivefold.training.updates.places import Places
from fivefold.training.updates.stochastic import key_of
from tests.training.updates.test_places import blocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENTS = (torch.float32, torch.bfloat16, CODES)
NUMBERS = Numbers.of(Settings(eps=1e-6), 1e-2, 0.3, 3)
STRANGE = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-41, -1e-41, 3.3e38, -3.3e38, 1e19)


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    """NaN is NaN, whatever its bits."""
    assert torch.equal(one.isnan(), other.isnan())
    kept = ~one.isnan()
    assert torch.equal(one[kept], other[kept])
    assert torch.equal(one[kept].signbit(), other[kept].signbit())


def assert_agree(
    values: list[torch.Tensor], moments: torch.dtype, copy: Any, places: Places, scale: Any, name: str
) -> None:
    """Both do the same with `values`: gradient, master, and the two moments in float32."""
    key = key_of(0, 3, name)
    results = []
    for update in (adamw, kernels.adamw):
        gradient, master, first, second = (value.clone() for value in values)
        computing = None if copy is None else torch.full_like(master, 7.0).to(copy)
        kept = narrowed(first.flatten(), second.flatten(), moments, places, 0, key)
        m, v = (moment.view(master.shape) for moment in kept)
        operands = Operands(gradient, master, (m, v), computing)
        update(operands, NUMBERS, scale, places, key)
        results.append(operands)
    (_, master, moments_there, computing), (_, ours, mine, written) = results
    assert_same_bits(ours, master)
    for one, other in zip(mine, moments_there, strict=True):
        assert_same_bits(one, other)
    if computing is not None and written is not None:
        if computing.dtype == torch.float16:
            assert_same_bits(written, computing)
        else:  # the interpreter cuts bfloat16 off, where a GPU rounds to the nearest
            torch.testing.assert_close(written, computing, rtol=2.0**-7, atol=0.0)


@given(
    block=blocks().filter(lambda block: len(block[0]) <= 3),
    far=st.sampled_from([0, 2**31 - 5, 2**32 - 3, 2**40]),
    gradients=st.sampled_from(DTYPES),
    moments=st.sampled_from(MOMENTS),
    copy=st.sampled_from([None, *DTYPES[1:]]),
    scaled=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=30)
def any_block(
    block: Any, far: int, gradients: torch.dtype, moments: torch.dtype, copy: Any, scaled: bool, seed: int
) -> None:
    offset, shape, whole = block
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for _ in range(4)]
    values[0], values[3] = values[0].to(gradients), values[3].abs()
    places = Places.of_slab(offset, shape, whole)
    scale = torch.tensor(0.37) if scaled else None
    assert_agree(values, moments, copy, places._replace(first=places.first + far), scale, f"a{seed}")


def several_blocks_of_each_row() -> None:
    for shape, whole in (((3000,), (3000,)), ((5, 1500), (5, 4000)), ((3, 2, 1100), (3, 4, 2000))):
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for _ in range(4)]
        values[3] = values[3].abs()
        places = Places.of_slab((0,) * len(shape), shape, whole)
        for moments in MOMENTS[1:]:
            assert_agree(values, moments, torch.bfloat16, places, torch.tensor(0.5), "b")


def strange_numbers() -> None:
    """Zeros, infinities, NaN, what is too small to be normal, and what overflows."""
    every = torch.tensor(STRANGE)
    count = len(every) ** 2
    one, other, ones = every.repeat(len(every)), every.repeat_interleave(len(every)), torch.ones(count)
    places = Places.of_slab((0,), (count,), (count,))
    for seed in range(8):
        for values in ([one, ones, other, ones], [other, ones, one, ones]):
            for moments in MOMENTS[1:]:
                assert_agree(values, moments, None, places, None, f"c{seed}")


def every_pair_of_codes() -> None:
    """A gradient of 0 lets both moments decay, whatever they are; and one that lets them grow."""
    first = torch.arange(256).repeat(256).to(torch.uint8)
    second = torch.arange(256).repeat_interleave(256).to(torch.uint8)
    places = Places.of_slab((0,), (1 << 16,), (1 << 16,))
    for size in (0.0, 1e-7, 1e-3, 1.0):
        found = []
        for update in (adamw, kernels.adamw):
            moments = first.clone(), second.clone()
            operands = Operands(torch.full((1 << 16,), size), torch.ones(1 << 16), moments, None)
            update(operands, NUMBERS, None, places, key_of(0, 3, "e"))
            found.append(operands)
        assert_same_bits(found[1].master, found[0].master)
        for one, other in zip(found[1].moments, found[0].moments, strict=True):
            assert torch.equal(one, other)


@given(
    block=blocks().filter(lambda block: len(block[0]) <= 3),
    gradients=st.sampled_from(DTYPES[:2]),
    scaled=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=15)
def momentum_of_any_block(block: Any, gradients: torch.dtype, scaled: bool, seed: int) -> None:
    offset, shape, whole = block
    generator = torch.Generator().manual_seed(seed)
    gradient, kept = (torch.randn(shape, generator=generator) for _ in range(2))
    scale, places = torch.tensor(0.37) if scaled else None, Places.of_slab(offset, shape, whole)
    found = []
    for update in (operations.momentum, kernels.momentum):
        pair = gradient.to(gradients).clone(), kept.bfloat16()
        update(*pair, 0.95, scale, places, key_of(seed, 3, "m"))
        found.append(pair)
    assert_same_bits(found[1][1], found[0][1])
    if gradients == torch.float32:
        assert_same_bits(found[1][0], found[0][0])
    else:  # the interpreter cuts bfloat16 off
        torch.testing.assert_close(found[1][0], found[0][0], rtol=2.0**-7, atol=0.0)


def a_gradient_that_lies_transposed() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn((6, 9), generator=generator) for _ in range(4)]
    values[0], values[3] = torch.randn((9, 6), generator=generator).t(), values[3].abs()
    assert_agree(values, torch.bfloat16, None, Places.of_slab((0, 0), (6, 9), (6, 9)), None, "d")


if __name__ == "__main__":
    any_block()
    several_blocks_of_each_row()
    strange_numbers()
    a_gradient_that_lies_transposed()
    every_pair_of_codes()
    momentum_of_any_block()
    print("the same bits")
