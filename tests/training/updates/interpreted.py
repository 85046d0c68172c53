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
from fivefold.training.updates import kernels
from fivefold.training.updates.operations import Numbers, Operands, adamw
from fivefold.training.updates.places import Places
from fivefold.training.updates.stochastic import key_of
from tests.training.updates.test_places import blocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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
        operands = Operands(gradient, master, (first.to(moments), second.to(moments)), computing)
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
    moments=st.sampled_from(DTYPES[:2]),
    copy=st.sampled_from([None, *DTYPES[1:]]),
    scaled=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=60)
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
        assert_agree(values, torch.bfloat16, torch.bfloat16, places, torch.tensor(0.5), "b")


def strange_numbers() -> None:
    """Zeros, infinities, NaN, what is too small to be normal, and what overflows."""
    every = torch.tensor(STRANGE)
    count = len(every) ** 2
    one, other, ones = every.repeat(len(every)), every.repeat_interleave(len(every)), torch.ones(count)
    places = Places.of_slab((0,), (count,), (count,))
    for seed in range(8):
        for values in ([one, ones, other, ones], [other, ones, one, ones]):
            assert_agree(values, torch.bfloat16, None, places, None, f"c{seed}")


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
    print("the same bits")
