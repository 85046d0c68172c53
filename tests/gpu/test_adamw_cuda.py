"""AdamW of our own on a GPU: the bits of torch's operations on a CPU, and the weights of torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.comm.world import single_world
from fivefold.config import Job, resolve
from fivefold.config import Optimizer as Settings
from fivefold.training.build import build
from fivefold.training.optimizer import by_torch
from fivefold.training.run import TrainingRun
from fivefold.training.updates import operations
from fivefold.training.updates.adamw import MOMENTS, AdamW
from fivefold.training.updates.codes import encoded
from fivefold.training.updates.moments import CODES
from fivefold.training.updates.operations import Numbers, Operands, adamw
from fivefold.training.updates.places import Places
from fivefold.training.updates.stochastic import key_of
from tests.cases import SPEC, Case, batches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS = Settings(eps=1e-6)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENTS_IN = (torch.float32, torch.bfloat16, CODES)
BLOCKS = {
    "rows": ((5, 0), (300, 1000), (400, 1000)),
    "columns": ((0, 17), (300, 1111), (300, 4000)),
    "a stack": ((1, 2, 3), (3, 40, 1500), (8, 50, 2000)),
    "a vector": ((4,), (999,), (1500,)),
    "one element": ((7, 3), (1, 1), (9, 5)),
}


def on(device: str, values: list[torch.Tensor], moments: torch.dtype, copy: torch.dtype | None) -> Operands:
    gradient, master, first, second = (value.to(device, copy=True) for value in values)
    computing = None if copy is None else torch.zeros_like(master, dtype=copy)
    if moments == CODES:
        words = torch.zeros(master.shape, dtype=torch.int32, device=device)
        return Operands(gradient, master, encoded(first, second, words), computing)
    return Operands(gradient, master, (first.to(moments), second.to(moments)), computing)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    found = found.cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(found[kept], expected[kept])


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("gradients", DTYPES)
@pytest.mark.parametrize("moments", MOMENTS_IN)
@pytest.mark.parametrize("copy", [None, *DTYPES[1:]])
@pytest.mark.parametrize("far", [0, 2**32 - 3])
def test_the_kernel_computes_the_bits_of_torchs_operations(
    name: str, gradients: torch.dtype, moments: torch.dtype, copy: torch.dtype | None, far: int
) -> None:
    from fivefold.training.updates import kernels

    offset, shape, whole = BLOCKS[name]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for _ in range(4)]
    values[0], values[3] = values[0].to(gradients), values[3].abs()
    places = Places.of_slab(offset, shape, whole)
    places = places._replace(first=places.first + far)
    there, here = on("cpu", values, moments, copy), on("cuda", values, moments, copy)
    for count in range(1, 4):
        numbers, key = Numbers.of(SETTINGS, 1e-2, 0.3, count), key_of(1, count, "a")
        scale = torch.tensor(0.37)
        adamw(there, numbers, scale, places, key)
        kernels.adamw(here, numbers, scale.cuda(), places, key)
    assert_same_bits(here.master, there.master)
    for mine, theirs in zip(here.moments, there.moments, strict=True):
        assert_same_bits(mine, theirs)
    if here.copy is not None and there.copy is not None:
        assert_same_bits(here.copy, there.copy)


@pytest.mark.parametrize("moments", MOMENTS_IN[1:])
def test_strange_numbers(moments: torch.dtype) -> None:
    """Zeros, infinities, NaN, what is too small to be normal, and what overflows."""
    from fivefold.training.updates import kernels

    every = torch.tensor((0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-41, -1e-41, 3.3e38, -3.3e38, 1e19))
    one, other = every.repeat(len(every)), every.repeat_interleave(len(every))
    ones, places = torch.ones(len(one)), Places(0, ((len(one), 1),))
    for values in ([one, ones, other, ones], [other, ones, one, ones]):
        there, here = (on(device, values, moments, None) for device in ("cpu", "cuda"))
        numbers, key = Numbers.of(SETTINGS, 1e-2, 0.3, 1), key_of(1, 1, "a")
        adamw(there, numbers, None, places, key)
        kernels.adamw(here, numbers, None, places, key)
        assert_same_bits(here.master, there.master)
        for mine, theirs in zip(here.moments, there.moments, strict=True):
            assert_same_bits(mine, theirs)


@pytest.mark.parametrize("gradients", DTYPES)
@pytest.mark.parametrize("copy", [None, *DTYPES[1:]])
@pytest.mark.parametrize("apart", [0, 1])
def test_many_in_one_launch_get_the_bits_of_torchs_operations(
    gradients: torch.dtype, copy: torch.dtype | None, apart: int
) -> None:
    """Small and large, with decay and without; and that begin where no address divides by 16."""
    from fivefold.training.updates import together

    generator = torch.Generator().manual_seed(0)
    pairs = []
    for number, size in enumerate((1, 999, 1024, 4096, (1 << 16) + 3, 300_000)):
        values = [torch.randn(size + apart, generator=generator) for _ in range(4)]
        values[0], values[3] = values[0].to(gradients), values[3].abs()
        there, here = on("cpu", values, torch.float32, copy), on("cuda", values, torch.float32, copy)
        numbers = Numbers.of(SETTINGS, 1e-2, 0.3 * (number % 2), 3)
        pairs.append((behind(there, apart), behind(here, apart), numbers))
    scale = torch.tensor(0.37)
    for _ in range(2):
        for there, _, numbers in pairs:
            adamw(there, numbers, scale, Places(0, ((there.master.numel(), 1),)), (0, 0))
        together.adamw([(here, numbers) for _, here, numbers in pairs], scale.cuda())
    for there, here, _ in pairs:
        assert_same_bits(here.master, there.master)
        for mine, theirs in zip(here.moments, there.moments, strict=True):
            assert_same_bits(mine, theirs)
        if here.copy is not None and there.copy is not None:
            assert_same_bits(here.copy, there.copy)


def behind(operands: Operands, apart: int) -> Operands:
    """All but the first elements of each."""
    gradient, master, (first, second), copy = operands
    moments = first[apart:], second[apart:]
    return Operands(gradient[apart:], master[apart:], moments, None if copy is None else copy[apart:])


def test_every_pair_of_codes() -> None:
    """A gradient of 0 lets both moments decay, whatever they are; and others let them grow."""
    from fivefold.training.updates import kernels

    every = torch.arange(256).to(torch.uint8)
    first, second = every.repeat(256), every.repeat_interleave(256)
    places, key = Places(0, ((1 << 16, 1),)), key_of(1, 1, "e")
    for size in (0.0, 1e-7, 1e-3, 1.0):
        found = []
        for device, update in (("cpu", adamw), ("cuda", kernels.adamw)):
            moments = first.to(device, copy=True), second.to(device, copy=True)
            gradient, master = (torch.full((1 << 16,), x, device=device) for x in (size, 1.0))
            operands = Operands(gradient, master, moments, None)
            update(operands, Numbers.of(SETTINGS, 1e-2, 0.3, 3), None, places, key)
            found.append(operands)
        assert_same_bits(found[1].master, found[0].master)
        for mine, theirs in zip(found[1].moments, found[0].moments, strict=True):
            assert torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("gradients", DTYPES[:2])
def test_muons_rounded_momentum_has_the_bits_of_torchs_operations(name: str, gradients: torch.dtype) -> None:
    from fivefold.training.updates import kernels

    offset, shape, whole = BLOCKS[name]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for _ in range(2)]
    places, scale = Places.of_slab(offset, shape, whole), torch.tensor(0.37)
    there = values[0].to(gradients), values[1].bfloat16()
    here = there[0].cuda(), there[1].cuda()
    operations.momentum(*there, 0.95, scale, places, key_of(1, 2, "m"))
    kernels.momentum(*here, 0.95, scale.cuda(), places, key_of(1, 2, "m"))
    for mine, theirs in zip(here, there, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_with_moments_in_float32_weights_are_those_of_torchs_own(precision: str, narrow: bool) -> None:
    """Within 1e-6 after 50 updates with the same gradients, of which torch's gets float32 ones."""
    training = {"precision": precision, "micro_batch": 8}
    job = Case("updates", training=training, spec=SPEC | {"dim": 256, "ffn": 512}).job()
    ours, theirs = (build(job, torch.device("cuda")) for _ in range(2))
    every = range(len(ours.weights.masters))
    mine, torchs = ours.optimizer.updates[0], by_torch(job, theirs.weights, every)
    assert isinstance(mine, AdamW), "on a GPU it is the rule"
    generator = torch.Generator("cuda").manual_seed(0)
    for count in range(1, 51):
        for one, other in zip(ours.weights.masters, theirs.weights.masters, strict=True):
            drawn = torch.randn(one.shape, generator=generator, device="cuda")
            if narrow and ours.weights.narrow:
                drawn = drawn.bfloat16()
            one.grad, other.grad = drawn, drawn.float()
        lr, scale = 1e-3 * (1 + count % 3), torch.tensor(0.5, device="cuda")
        ours.optimizer.step(lr, scale)
        torchs.step(lr, scale)
    for index, name in enumerate(ours.weights.names):
        one, other = ours.weights.masters[index].detach(), theirs.weights.masters[index].detach()
        assert ((one - other).norm() / other.norm()) < 1e-6, name
        assert ((one - other).abs().max() / other.abs().max()) < 1e-6, name
        for kind in MOMENTS:
            expected = torchs.states(index)[kind]
            torch.testing.assert_close(mine.states(index)[kind], expected, rtol=1e-4, atol=1e-6)
        computing = ours.weights.parameters[index]
        assert torch.equal(computing, one.to(computing.dtype))


@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_steps_with_gradients_in_16_bits_are_those_with_wide_ones(states: str) -> None:
    """Losses, norms and weights after some steps, clipped, to the last bit."""
    training = {"precision": "bf16", "micro_batch": 8, "clip": 0.1}
    job = Case("narrow", training=training, optimizer={"states": states}).job()
    found = []
    for narrow in (True, False):
        built = build(job, torch.device("cuda"))
        assert built.weights.narrow
        if not narrow:
            built.weights.narrow = frozenset()
        told = []
        with batches(job, built) as loader:
            for step in range(1, 5):
                result = built.step(next(loader), 1e-2, step)
                told.append((result.loss, result.grad_norm))
        found.append((told, [*built.weights.masters, *built.optimizer.tensors()]))
    (told, mine), (expected, theirs) = found
    assert told == expected
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)


def run(folder: Path, steps: int, stop: int, **optimizer: Any) -> list[float]:
    model = SPEC | {"vocab_size": 512, "dim": 256, "ffn": 512, "max_seq_len": 512}
    job = Job.model_validate(
        {
            "model": model,
            "training": {"steps": steps, "global_batch": 4, "seq_len": 256},
            "data": {"source": "stdlib", "cache": str(folder.parent / "cache")},
            "optimizer": {"warmup": 2, "schedule": "constant"} | optimizer,
            "checkpoint": {"every": stop},
        }
    )
    found = []
    with TrainingRun(resolve(job, 1, "cuda"), single_world("cuda"), folder) as training:
        while not training.done and training.progress.step < stop:
            found.append(training.advance()["loss"])
    return found


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_run_learns_with_states_in_fewer_bits(name: str, kind: str, tmp_path: Path) -> None:
    plain, narrow = (run(tmp_path / states, 40, 40, states=states, name=name) for states in ("fp32", kind))
    assert narrow[0] == pytest.approx(plain[0], rel=1e-3)
    assert narrow[-1] == pytest.approx(plain[-1], rel=0.02)
    assert narrow[-1] < 0.8 * narrow[0]


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_run_goes_on_where_it_was_saved(kind: str, tmp_path: Path) -> None:
    """Its moments come back as they were: losses are those of a run that was never stopped."""
    straight = run(tmp_path / "straight", 8, 8, states=kind)
    halves = run(tmp_path / "halves", 8, 4, states=kind) + run(tmp_path / "halves", 8, 8, states=kind)
    assert halves == pytest.approx(straight, rel=1e-3)


def test_moments_take_half_or_a_quarter_of_the_bytes() -> None:
    found = {}
    for states in ("fp32", "bf16", "int8"):
        case = Case("bytes", training={"precision": "bf16"}, optimizer={"states": states}, spec=SPEC)
        built = build(case.job(), torch.device("cuda"))
        for master in built.weights.masters:
            master.grad = torch.ones_like(master)
        built.optimizer.step(1e-3)
        found[states] = sum(each.nbytes for each in built.optimizer.tensors() if each.dim())
    assert found["bf16"] == found["fp32"] / 2
    assert found["int8"] == found["fp32"] / 4
