"""Layers in 8 bits by a GPU's kernels: as the operations of a CPU compute them, eagerly and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.axes.runtime.fp8_numbers import (
    E4M3,
    E5M2,
    Scaled,
    cast_for_both,
    cast_for_left,
    cast_for_right,
    largest,
    largest_both,
    product,
    scale_for,
)
from fivefold.comm.world import single_world
from fivefold.config import Job, resolve
from fivefold.training.run import TrainingRun

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with fp8"
)

SHAPES = [(16, 16), (48, 272), (256, 128), (1040, 400), (2048, 1024)]
STRANGE = (0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3.38e38)


def numbers(rows: int, columns: int, spread: float = 8.0) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    signs = torch.randn(rows, columns, generator=generator)
    return (signs * (torch.randn(rows, columns, generator=generator) * spread).exp2()).bfloat16()


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Bit for bit; NaN is NaN, whatever its bits."""
    there, here = found.cpu(), expected
    assert there.shape == here.shape
    assert there.stride() == here.stride()
    nan = here.float().isnan()
    assert torch.equal(there.float().isnan(), nan)
    bits = torch.uint8 if here.element_size() == 1 else torch.int32
    assert torch.equal(there.contiguous().view(bits)[~nan], here.contiguous().view(bits)[~nan])


def assert_same_casts(found: tuple[Scaled, ...], expected: tuple[Scaled, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same(one.values, other.values)
        assert_same(one.scale, other.scale)


def casts(x: Tensor, rowwise: bool, dtype: torch.dtype) -> tuple[Scaled, ...]:
    """In every way that layers make them."""
    amax = largest_both(x) if rowwise else (largest(x), largest(x))
    of_rows, of_columns = (scale_for(found, dtype) for found in amax)
    both = cast_for_both(x, of_rows, of_columns, dtype)
    return *both, cast_for_left(x, of_rows, dtype), cast_for_right(x, of_columns, dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_kernels_cast_as_a_cpu_does(shape: tuple[int, int], rowwise: bool, dtype: torch.dtype) -> None:
    x = numbers(*shape)
    assert_same_casts(casts(x.cuda(), rowwise, dtype), casts(x, rowwise, dtype))


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_kernels_cast_strange_numbers_as_a_cpu_does(
    strange: float, rowwise: bool, dtype: torch.dtype
) -> None:
    x = numbers(64, 160, 30.0)
    x[5, 77] = strange
    assert_same_casts(casts(x.cuda(), rowwise, dtype), casts(x, rowwise, dtype))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_gpu_rounds_to_the_nearest_and_ties_to_even(dtype: torch.dtype) -> None:
    """Every number of bfloat16 of some powers of two, those included that lie between two of 8 bits."""
    every = torch.arange(0x3800, 0x4380, dtype=torch.int16).view(torch.bfloat16)
    x = torch.cat([every, -every])[: len(every) * 2 // 256 * 256].view(-1, 16)
    for power in (0, -8, -20):
        scale = torch.tensor(2.0**power)
        here = cast_for_left(x, scale, dtype), cast_for_right(x, scale, dtype)
        there = cast_for_left(x.cuda(), scale.cuda(), dtype), cast_for_right(x.cuda(), scale.cuda(), dtype)
        assert_same_casts(there, here)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_a_gpu_multiplies_what_the_emulation_does(rowwise: bool, fast: bool) -> None:
    """All three products of a layer, but for sums in another order or of fewer bits."""
    x, w, g = numbers(64, 128, 1.0), numbers(96, 128, 1.0), numbers(64, 96, 1.0)
    found = []
    for device in ("cpu", "cuda"):
        of_x, of_w = (casts(each.to(device), rowwise, E4M3) for each in (x, w))
        of_g = casts(g.to(device), rowwise, E5M2)
        pairs = (of_x[0], of_w[0].turned()), (of_g[0], of_w[1]), (of_g[1].turned(), of_x[1])
        found.append([product(a, b, fast).cpu() for a, b in pairs])
    for expected, result in zip(*found, strict=True):
        most = float(expected.abs().max())
        torch.testing.assert_close(result, expected, rtol=2**-6, atol=2.0**-9 * most)


def job_of(scales: str, compile: bool, recompute: str) -> Job:
    model = {"name": "cut", "vocab_size": 512, "dim": 256, "layers": 2, "heads": 8, "kv_heads": 4, "ffn": 512}
    training: dict[str, Any] = {"steps": 4, "seq_len": 256, "global_batch": 2, "precision": "bf16"}
    training |= {} if scales == "none" else {"fp8": scales, "fp8_small": True}
    return resolve(
        Job.model_validate(
            {
                "model": model | {"max_seq_len": 256},
                "training": training | {"compile": compile, "recompute": recompute},
                "data": {"source": "random"},
                "optimizer": {"warmup": 1},
                "checkpoint": {"keep": 0},
                "run": {"tensorboard": False},
            }
        ),
        1,
        "cuda",
    )


def losses(job: Job, folder: Path) -> list[float]:
    found: list[float] = []
    with TrainingRun(job, single_world("cuda"), folder) as run:
        while not run.done:
            found.append(run.advance()["loss"])
    return found


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("scales", ["tensorwise", "rowwise"])
def test_compiled_blocks_train_as_eager_ones(scales: str, recompute: str, tmp_path: Path) -> None:
    eager = losses(job_of(scales, False, "none"), tmp_path / "eager")
    compiled = losses(job_of(scales, True, recompute), tmp_path / "compiled")
    assert compiled == pytest.approx(eager, rel=2.0**-7)
    bf16 = losses(job_of("none", False, "none"), tmp_path / "bf16") if recompute == "none" else eager
    assert eager == pytest.approx(bf16, rel=2.0**-4)
