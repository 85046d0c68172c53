"""States in host memory, piece by piece through the device: bit for bit what they are without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.comm.world import World, single_world
from fivefold.config import Job
from fivefold.replay.account import account
from fivefold.training import host_tensors
from fivefold.training.build import Built, build
from fivefold.training.checkpoint import Progress, Saver, load_latest
from fivefold.training.learning_rate import learning_rate
from fivefold.training.updates import offloaded as offloaded_module
from fivefold.training.updates.places import Places
from fivefold.training.weights import local
from tests.cases import SPEC, TIED, Case, batches, built_on_cpu, save
from tests.ranks import on_ranks
from tests.training.updates.test_places import blocks

offloaded: Any = offloaded_module
PIECE = 192
"""Elements that travel at a time: most parameters of the cases have more, and no whole number of pieces."""
STEPS, HALF = 4, 2
MOE = SPEC | {"layers": 2, "experts": 4, "experts_per_token": 2, "ffn": 32}
SMALL = SPEC | {"layers": 2}
OVERFLOWING: dict[str, Any] = {"precision": "fp16", "loss_scale": 2.0**21, "clip": 0.0}
BF16: dict[str, Any] = {"precision": "bf16", "micro_batch": 2, "clip": 0.05}
EMA, NARROW = {"ema": 0.8}, {"states": "bf16", "ema": 0.8}
ALONE = {
    case.name: case
    for case in (
        Case("fp64", training={"clip": 0.05}, optimizer=EMA),
        Case("fp32", training={"precision": "fp32", "clip": 0.05}, optimizer=EMA),
        Case("fp32 states", training={"precision": "fp32"}, optimizer=NARROW),
        Case("bf16", training=BF16, optimizer=EMA),
        Case("bf16 states", training=BF16, optimizer=NARROW, spec=TIED),
        Case("bf16, one micro-batch", training=BF16 | {"micro_batch": 8}, optimizer=EMA),
        Case("int8 states", training=BF16, optimizer={"states": "int8", "ema": 0.8}),
        Case("fp16", training=OVERFLOWING, optimizer={"lr": 1e-3}),
        Case("sgd", training=BF16, optimizer={"name": "sgd", "lr": 0.1}),
        Case("sgd without momentum", training=BF16, optimizer={"name": "sgd", "momentum": 0.0, "ema": 0.8}),
    )
}
SPLIT = {
    case.name: case
    for case in (
        *(Case(f"zero{zero} states", 2, {"zero": zero}, BF16, NARROW, SMALL) for zero in range(4)),
        *(Case(f"zero{zero}", 2, {"zero": zero}, BF16, EMA, SMALL) for zero in range(4)),
        Case("zero3 fp32", 2, {"zero": 3}, BF16 | {"precision": "fp32"}, spec=SMALL),
        Case("tp", 2, {"tp": 2}, BF16, EMA, SMALL),
        Case("zero3 int8 states", 2, {"zero": 3}, BF16, {"states": "int8"}, SMALL),
        Case("tp states", 2, {"tp": 2}, BF16, NARROW, SMALL),
        Case("zbv tied", 2, {"pp": 2, "schedule": "zbv"}, BF16, NARROW, TIED),
        Case("ep", 2, {"dp_shard": 2, "ep": 2, "zero": 3}, BF16, NARROW, MOE),
    )
}

QUICK = ("zero0", "zero3 int8 states", "tp states", "zbv tied")
SLOW = [name for name in SPLIT if name not in QUICK]


@contextmanager
def small_pieces() -> Iterator[None]:
    usual = offloaded.PART
    offloaded.PART = PIECE
    try:
        yield
    finally:
        offloaded.PART = usual


def with_offload(job: Job, offload: bool) -> Job:
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"offload": offload})})


def advance(built: Built, start: int, end: int) -> list[tuple[float, float, bool]]:
    found = []
    with batches(built.job, built, start) as loader:
        for step in range(start + 1, end + 1):
            lr = learning_rate(built.job.optimizer, step, built.job.training.steps)
            result = built.step(next(loader), lr, step)
            found.append((result.loss, result.grad_norm, result.skipped))
    return found


def kept(built: Built) -> dict[str, torch.Tensor]:
    """What this rank keeps of everything, by name; and what it computes with."""
    weights = built.weights
    every = zip(weights.names, weights.masters, weights.parameters, strict=True)
    found = {}
    for index, (name, master, parameter) in enumerate(every):
        place = f"{index} {name}"
        found[f"{place} master"] = master.detach().clone()
        found[f"{place} computing"] = local(parameter.detach()).clone()
        for kind, value in built.optimizer.state()[name].items():
            found[f"{place} {kind}"] = local(value).clone()
    return found


Trained = tuple[list[tuple[float, float, bool]], dict[str, torch.Tensor]]


def trained(world: World, cases: dict[str, Case], offload: bool) -> dict[str, Trained]:
    found = {}
    with small_pieces():
        for name, case in cases.items():
            built = built_on_cpu(with_offload(case.job(), offload))
            found[name] = advance(built, 0, STEPS), kept(built)
    return found


@cache
def both(ranks: int, quick: bool) -> list[list[dict[str, Trained]]]:
    """Of the cases of one process; of two ranks only the quick ones, or only the slow ones."""
    cases = ALONE if ranks == 1 else {name: case for name, case in SPLIT.items() if (name in QUICK) == quick}
    return [on_ranks(trained, ranks, cases, offload) for offload in (False, True)]


def assert_same(found: Trained, expected: Trained) -> None:
    assert repr(found[0]) == repr(expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert found[1][name].dtype == value.dtype
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("name", [*ALONE, *QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_it_is_bit_for_bit_what_it_is_without(name: str) -> None:
    """Losses, norms, weights, moments, averages and counters, on every rank; and gradients were clipped."""
    for plain, offload in zip(*both(1 if name in ALONE else 2, name in QUICK), strict=True):
        assert_same(offload[name], plain[name])
        steps = offload[name][0]
        assert all(norm > 0.05 for _, norm, skipped in steps if not skipped)
        assert any(skipped for *_, skipped in steps) == (name == "fp16")


# --- pieces ------------------------------------------------------------------------------------------------


@given(block=blocks(), limit=st.integers(1, 40))
@settings(deadline=None)
def test_pieces_cover_a_block_one_behind_the_other(block: Any, limit: int) -> None:
    places = Places.of_slab(*block)
    count = torch.Size(block[1]).numel()
    expected = places.indices(0, count, torch.device("cpu"))
    found, end = [], 0
    for start, stop, piece in places.cut(limit):
        assert start == end
        assert 0 < stop - start <= limit
        found.append(piece.indices(0, stop - start, torch.device("cpu")))
        end = stop
    assert end == count
    assert torch.equal(torch.cat(found), expected)


def test_pieces_of_one_run_are_as_large_as_they_may_be() -> None:
    """So a GPU is given few of them, and each begins at a place that its vectors like."""
    cut = list(Places.of_slab((0, 0), (100, 33), (100, 33)).cut(PIECE))
    assert [stop - start for start, stop, _ in cut] == [PIECE] * 17 + [3300 - 17 * PIECE]


# --- where everything lies ---------------------------------------------------------------------------------


def test_what_only_the_optimizer_uses_lies_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters where they are a copy, moments, the average; what the model computes with does not."""
    made: list[int] = []
    plain = offloaded.zeros_on_host

    def marked(*args: Any) -> torch.Tensor:
        tensor: torch.Tensor = plain(*args)
        made.append(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(offloaded, "zeros_on_host", marked)
    monkeypatch.setattr(host_tensors, "zeros_on_host", marked)
    for precision, masters in (("bf16", True), ("fp32", False)):
        made.clear()
        job = Case("", training={"precision": precision}, optimizer=EMA | {"offload": True}, spec=SMALL).job()
        built = build(job, torch.device("cpu"))
        advance(built, 0, 2)
        assert {master.data_ptr() in made for master in built.weights.masters} == {masters}
        assert all(parameter.data_ptr() not in made for parameter in built.weights.parameters)
        states = [tensor for tensor in built.optimizer.tensors() if tensor.dim()]
        assert len(states) == 3 * len(built.weights.masters)
        assert all(tensor.data_ptr() in made for tensor in states)


def held_on_host(world: World, cases: dict[str, Case]) -> dict[str, tuple[Any, int, int]]:
    """Bytes in host memory, and of buffers on the device during an update."""
    found, sets = {}, []
    plain = offloaded.Transfers

    def noted(*args: Any) -> Any:
        transfers = plain(*args)
        sets.append(transfers.sets)
        return transfers

    offloaded.Transfers = noted
    try:
        for name, case in cases.items():
            built = built_on_cpu(with_offload(case.job(), True))
            advance(built, 0, 1)
            assert built.optimizer.offloaded is not None
            buffers = sum(tensor.nbytes for each in sets[-1] for tensor in each.values())
            found[name] = built.mesh.place, built.optimizer.offloaded.host_bytes, buffers
    finally:
        offloaded.Transfers = plain
    return found


@cache
def hosted(ranks: int) -> list[dict[str, tuple[Any, int, int]]]:
    return on_ranks(held_on_host, ranks, {n: c for n, c in {**ALONE, **SPLIT}.items() if c.ranks == ranks})


@pytest.mark.parametrize("name", [*(n for n in ALONE if n != "fp16"), *SPLIT])
def test_the_ledger_counts_it_apart_to_the_byte(name: str) -> None:
    case = {**ALONE, **SPLIT}[name]
    for rank in hosted(case.ranks):
        place, on_host, buffers = rank[name]
        ledger, plain = (account(with_offload(case.job(), each), place) for each in (True, False))
        assert ledger.on_host == on_host
        assert plain.on_host == 0
        assert ledger.rest("states") == plain.rest("states") - on_host
        assert ledger.peak("states") - ledger.rest("states") == buffers


# --- saved, and taken up -----------------------------------------------------------------------------------


def saving(world: World, job: Job, run: Path) -> None:
    with small_pieces():
        built = built_on_cpu(job)
        advance(built, 0, HALF)
        save(built, run, Progress(HALF, 0, loss=2.5))


def going_on(world: World, jobs: list[Job], run: Path) -> list[Trained]:
    found = []
    with small_pieces():
        for job in jobs:
            built = built_on_cpu(job)
            assert load_latest(built, run) == (Progress(HALF, 0, loss=2.5), [])
            found.append((advance(built, HALF, STEPS), kept(built)))
    return found


@pytest.mark.parametrize(
    "name",
    ["bf16", "sgd", "zero0", "zbv tied", *(pytest.param(n, marks=pytest.mark.slow) for n in ("zero3", "tp"))],
)
def test_a_run_is_taken_up_with_it_and_without(name: str, tmp_path: Path) -> None:
    case = {**ALONE, **SPLIT}[name]
    straight = both(case.ranks, name in QUICK)[0]
    jobs = [with_offload(case.job(), offload) for offload in (True, False)]
    for number, job in enumerate(jobs):
        on_ranks(saving, case.ranks, job, tmp_path / str(number))
        for rank, found in enumerate(on_ranks(going_on, case.ranks, jobs, tmp_path / str(number))):
            steps, expected = straight[rank][name]
            for each in found:
                assert_same(each, (steps[HALF:], expected))


def test_another_layout_takes_it_up(tmp_path: Path) -> None:
    """Saved under ZeRO 3, where masters are FSDP's; under ZeRO 0 they lie in host memory."""
    job = with_offload(SPLIT["zero3 states"].job(), True)
    on_ranks(saving, 2, job, tmp_path)
    jobs = [with_offload(SPLIT["zero0 states"].job(), offload) for offload in (True, False)]
    for offload, plain in on_ranks(going_on, 2, jobs, tmp_path):
        assert_same(offload, plain)


def test_what_is_saved_in_the_background_is_the_step_it_is_of(tmp_path: Path) -> None:
    """Training goes on at once; the file is written later."""
    built = build(with_offload(ALONE["bf16"].job(), True), torch.device("cpu"))
    advance(built, 0, HALF)
    expected = kept(built)
    saver = Saver(built, tmp_path, keep=1, background=True)
    write, held = saver._write, []

    def later(*args: Any) -> None:
        held.append(advance(built, HALF, STEPS))  # all of it happens before anything is written
        write(*args)

    saver._write = later  # type: ignore[method-assign, assignment]
    saver.save(Progress(HALF, 0, loss=2.5))
    saver.wait()
    assert held
    again = build(with_offload(ALONE["bf16"].job(), True), torch.device("cpu"))
    load_latest(again, tmp_path)
    for name, value in kept(again).items():
        assert torch.equal(value, expected[name]), name


def test_weights_that_lie_transposed_in_memory() -> None:
    """As a user's own model may have them: masters in host memory are row-major all the same."""
    found = []
    job = Case("transposed", training=BF16, optimizer=NARROW, spec=SMALL).job()
    for offload in (False, True):
        with small_pieces():
            built = build(with_offload(job, offload), torch.device("cpu"))
        weight = next(p for p in built.weights.parameters if p.dim() == 2 and p.shape[0] != p.shape[1])
        weight.data = weight.data.t().contiguous().t()
        advance(built, 0, 2)
        assert not weight.is_contiguous()
        found.append([parameter.detach().clone() for parameter in built.weights.parameters])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_run_says_what_lies_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fivefold.training.run import TrainingRun

    job = with_offload(Case("said", training={"precision": "bf16"}, spec=SMALL).job(), True)
    with TrainingRun(job, single_world("cpu"), tmp_path):
        pass
    assert "optimizer states: 0.00 GiB in host memory" in capsys.readouterr().err
