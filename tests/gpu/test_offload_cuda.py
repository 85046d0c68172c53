"""States in host memory on a GPU: the same bits, and as many bytes less on the card."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.config import Job
from fivefold.ledger.offload import buffer_bytes
from fivefold.ledger.setup import Setup
from fivefold.replay.account import account
from fivefold.training.build import Built, build
from fivefold.training.checkpoint import Progress, Saver, load_latest
from fivefold.training.updates import offloaded
from tests.cases import SPEC, Case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LARGE = SPEC | {"vocab_size": 4000, "dim": 512, "ffn": 2048}
CUDA = torch.device("cuda", 0)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fp32": {"ema": 0.9},
    "bf16": {"states": "bf16", "ema": 0.9},
    "sgd": {"name": "sgd", "lr": 0.1},
}


def job_of(optimizer: dict[str, Any], precision: str, offload: bool) -> Job:
    training = {"precision": precision, "micro_batch": 8}
    return Case("offload", training=training, optimizer=optimizer | {"offload": offload}, spec=LARGE).job()


def updated(built: Built, updates: int, start: int = 0) -> None:
    """Some updates with the same gradients in every call."""
    for number in range(start, start + updates):
        generator = torch.Generator(CUDA).manual_seed(number)
        for holder in built.weights.holders:
            holder.grad = torch.randn(holder.shape, generator=generator, device=CUDA)
        built.optimizer.step(1e-3 * (1 + number % 3), torch.tensor(0.5, device=CUDA))


def kept(built: Built) -> list[torch.Tensor]:
    states = built.optimizer.state()
    kinds = [kinds[kind] for _, kinds in sorted(states.items()) for kind in sorted(kinds)]
    every = [*built.weights.masters, *built.weights.parameters, *kinds]
    return [tensor.detach().cpu().clone() for tensor in every]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("piece", [1 << 14, 1 << 18, 1 << 23])
def test_the_same_bits(name: str, precision: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a piece: a buffer that is filled again too soon would show."""
    monkeypatch.setattr(offloaded, "PART", piece)
    found = []
    for offload in (False, True):
        built = build(job_of(OPTIMIZERS[name], precision, offload), CUDA)
        updated(built, 10)
        found.append(kept(built))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_host_memory_is_locked_and_the_card_has_that_much_less(precision: str) -> None:
    most = {}
    for offload in (False, True):
        job = job_of({"ema": 0.9}, precision, offload)
        gc.collect()
        before = torch.cuda.memory_allocated()
        built = build(job, CUDA)
        updated(built, 1)
        built.weights.clear_gradients()
        most[offload] = torch.cuda.memory_allocated() - before
        if built.optimizer.offloaded is not None:
            states = [tensor for tensor in built.optimizer.tensors() if tensor.dim()]
            assert all(tensor.is_pinned() for tensor in states)
            assert all(master.is_pinned() for master in built.weights.masters) == (precision == "bf16")
            assert built.optimizer.offloaded.host_bytes == account(job).on_host
        del built
    hosted = account(job_of({"ema": 0.9}, precision, True)).on_host
    # Torch gives memory in blocks of 512 bytes, to each tensor of its own.
    assert most[False] - most[True] == pytest.approx(hosted, rel=0.01)


def test_buffers_are_there_during_an_update_alone() -> None:
    job = job_of({}, "bf16", True)
    built = build(job, CUDA)
    updated(built, 1)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    built.optimizer.step(1e-3)
    largest = max(master.numel() for master in built.weights.masters)
    assert torch.cuda.memory_allocated() == before
    # Torch's AdamW has a counter for each piece beside them.
    more = torch.cuda.max_memory_allocated() - before
    assert buffer_bytes(Setup.of(job), largest) <= more <= buffer_bytes(Setup.of(job), largest) + (1 << 20)


def test_it_is_saved_and_taken_up_with_it_and_without(tmp_path: Path) -> None:
    job = job_of({"states": "bf16", "ema": 0.9}, "bf16", True)
    built = build(job, CUDA)
    updated(built, 2)
    saver = Saver(built, tmp_path, keep=1, background=True)
    saver.save(Progress(2, 0, loss=2.5))
    updated(built, 2, start=2)  # while it is written
    saver.wait()
    for offload in (True, False):
        again = build(job_of({"states": "bf16", "ema": 0.9}, "bf16", offload), CUDA)
        load_latest(again, tmp_path)
        updated(again, 2, start=2)
        for one, other in zip(kept(again), kept(built), strict=True):
            assert torch.equal(one, other)


def test_locked_memory_is_let_go_with_the_tensors() -> None:
    """Otherwise the next tensors at these addresses could not be locked."""
    for _ in range(4):
        built = build(job_of({}, "bf16", True), CUDA)
        updated(built, 1)
        del built
