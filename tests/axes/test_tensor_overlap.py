"""Messages inside matrix products: the same numbers, the same messages, fewer operations.

On CPUs each fused operation is a message and a product, one after the other. Proven here is that they mean
what torch's operators do, who is multiplied by what, and every derivative.
"""

from __future__ import annotations

import shutil
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.axes import tensor
from fivefold.axes.checks import check
from fivefold.axes.layout import Layout, Place
from fivefold.axes.runtime.tensor_overlap import gather_matmul, matmul_scatter
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.operators import collective
from fivefold.training.build import compile_parts
from fivefold.verification import ROUNDING, gradient_error
from tests.axes import test_tensor
from tests.axes.test_tensor import (
    EXPERTS,
    ONE_KEY_HEAD,
    PARALLEL,
    SPECS,
    Found,
    compute,
    inputs,
    job_of,
    put_together,
)
from tests.cases import SPEC, TIED, Case, gradients, mesh_of, passes
from tests.ranks import on_ranks
from tests.tracer import MessageTracer

PARALLEL_EXPERTS = EXPERTS | {"parallel_block": True}


def overlapped(job: Job) -> Job:
    """Resolving refuses the setting on CPUs, where it wins nothing."""
    wish = job.communication.model_copy(update={"tp_overlap": True})
    return job.model_copy(update={"communication": wish})


def tasks(ranks: int) -> dict[str, tuple[Job, bool]]:
    """By name: a job, and whether its sequences are packed documents."""
    found = {name: (job_of(ranks, spec), False) for name, spec in SPECS.items()}
    found["parallel block of experts"] = job_of(ranks, PARALLEL_EXPERTS), False
    found["packed documents"] = job_of(ranks, SPEC), True
    for mode in ("full", "every-3", "selective"):
        for name, spec in (("biases", TIED), ("parallel block", PARALLEL), ("experts", EXPERTS)):
            found[f"recompute {mode}, {name}"] = job_of(ranks, spec, recompute=mode), False
    return {name: (overlapped(job), documents) for name, (job, documents) in found.items()}


ON_FOUR = ("one key head", "parallel block", "recompute every-3, biases")
NAMES = [(2, name) for name in tasks(2)] + [(4, name) for name in ON_FOUR]


@cache
def found_by_ranks(ranks: int, name: str) -> list[Found]:
    return on_ranks(test_tensor.compute_split, ranks, *tasks(ranks)[name])


@pytest.mark.parametrize(("ranks", "name"), NAMES)
def test_loss_and_gradients_are_those_of_one_process(ranks: int, name: str) -> None:
    job, documents = tasks(ranks)[name]
    found = found_by_ranks(ranks, name)
    reference = compute(test_tensor.whole_model(job.spec), inputs(job, documents))
    assert [f.loss for f in found] == pytest.approx([reference.loss] * ranks, rel=1e-12)
    error, worst = gradient_error(put_together(job, [f.gradients for f in found]), reference.gradients)
    assert error <= ROUNDING, worst


@pytest.mark.parametrize(("ranks", "name"), NAMES)
def test_ranks_send_what_the_account_says(ranks: int, name: str) -> None:
    job, _ = tasks(ranks)[name]
    expected = passes(job, Place(), "tp").traffic()
    for found in found_by_ranks(ranks, name):
        assert found.traffic == expected


# --- how often ---------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts the operators of ours that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "fivefold" and collective(func) is None:
            self.counts[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


ENTRANCES_AND_EXITS = {
    "plain": (2, 2),
    "parallel block": (1, 2),
    "experts": (1, 1),  # of attention; experts enter and leave as ever
    "parallel block of experts": (0, 1),
    "recompute selective, parallel block": (1, 2),  # kept, not run again
    "recompute selective, experts": (1, 1),
}


def operations_of(world: World, jobs: list[Job]) -> list[dict[str, int]]:
    found = []
    for job in jobs:
        model = test_tensor.split_model(job, mesh_of(Layout.of(job)))
        with Operations() as operations:
            compute(model, inputs(job, documents=False))
        found.append(dict(operations.counts))
    return found


def test_every_entrance_and_exit_is_one_operation() -> None:
    """An exit's derivative is an entrance, and the other way round."""
    jobs = {name: tasks(2)[name][0] for name in ENTRANCES_AND_EXITS}
    for by_job in on_ranks(operations_of, 2, list(jobs.values())):
        for (name, job), operations in zip(jobs.items(), by_job, strict=True):
            both = job.spec.layers * sum(ENTRANCES_AND_EXITS[name])
            assert operations == {"gather_matmul": both, "matmul_scatter": both}, name


# --- torch's operators -------------------------------------------------------------------------------------


def differences_from_torch(world: World) -> list[float]:
    """How far our operations on CPUs are from the reference that torch gives for its own on GPUs."""
    from torch.distributed import _symmetric_memory as symmetric

    assert dist.group.WORLD is not None
    group: Any = dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(3 * world.size, 2, 5, generator=generator, dtype=torch.float64)
    matrices = [torch.randn(width, 5, generator=generator, dtype=torch.float64).t() for width in (4, 7)]
    whole, products = symmetric._fused_all_gather_matmul_fallback(x, matrices, 0, group)
    assert whole is not None
    expected = [whole, *products]
    expected += [symmetric._fused_matmul_reduce_scatter_fallback(x, matrices[0], "sum", 0, group)]
    found = [*gather_matmul(x, matrices, group), matmul_scatter(x, matrices[0], group)]
    assert [f.shape for f in found] == [e.shape for e in expected]
    assert all(f.is_contiguous() for f in found)
    return [float((f - e).abs().max()) for f, e in zip(found, expected, strict=True)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_operations_mean_what_torchs_do(ranks: int) -> None:
    assert all(max(found) <= 1e-12 for found in on_ranks(differences_from_torch, ranks))


# --- on top of other axes ----------------------------------------------------------------------------------


def step_by_step(world: World, jobs: list[Job]) -> list[tuple[dict[str, Any], dict[Any, int]]]:
    """A step's numbers and its messages over tp, for each job."""
    found = []
    for job in jobs:
        with MessageTracer(mesh_of(Layout.of(job))) as tracer:
            numbers = gradients(job)
        traffic = {key: count for key, count in tracer.traffic().items() if key[2] == "tp"}
        found.append((numbers, traffic))
    return found


def test_sharded_state_on_top() -> None:
    layout = {"tp": 2, "dp_shard": 2, "zero": 3}
    specs = (TIED, PARALLEL, ONE_KEY_HEAD)
    plain = [Case("sharded", 4, layout, {"micro_batch": 2, "global_batch": 4}, spec=s).job() for s in specs]
    numbers = [found for found, _ in on_ranks(step_by_step, 4, [*plain, *map(overlapped, plain)])[0]]
    for expected, overlap in zip(numbers[: len(plain)], numbers[len(plain) :], strict=True):
        assert overlap["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        error, worst = gradient_error(overlap["gradients"], expected["gradients"])
        assert error <= ROUNDING, worst


@pytest.mark.parametrize("schedule", ["zero-bubble"])
def test_a_pipeline_that_splits_backward_sends_nothing_twice(schedule: str) -> None:
    layout = {"pp": 2, "tp": 2, "dp_replicate": 1, "dp_shard": 1, "schedule": schedule}
    plain = Case(schedule, 4, layout, {"micro_batch": 1, "global_batch": 4}, spec=TIED).job()
    by_rank = on_ranks(step_by_step, 4, [plain, overlapped(plain)])
    for (_, messages), (_, overlapped_messages) in by_rank:
        assert overlapped_messages == messages
    (expected, _), (found, _) = by_rank[0]  # the rank that gets whole gradients
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    error, worst = gradient_error(found["gradients"], expected["gradients"])
    assert error <= ROUNDING, worst


def compute_compiled(world: World, job: Job) -> Found:
    model = test_tensor.split_model(job, mesh_of(Layout.of(job)))
    compile_parts(model)
    return compute(model, inputs(job, documents=False))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU takes a C++ compiler")
def test_compiled_blocks() -> None:
    job = overlapped(job_of(2, PARALLEL | {"layers": 2}))
    found = on_ranks(compute_compiled, 2, job)
    reference = compute(test_tensor.whole_model(job.spec), inputs(job, documents=False))
    error, worst = gradient_error(put_together(job, [f.gradients for f in found]), reference.gradients)
    assert error <= ROUNDING, worst


# --- what is kept, and what is refused ---------------------------------------------------------------------


def kept_in_forward(world: World, jobs: list[Job]) -> list[int]:
    """Bytes of different memory that a whole forward pass keeps for backward."""
    found = []
    for job in jobs:
        model = test_tensor.split_model(job, mesh_of(Layout.of(job)))
        kept: dict[int, int] = {}

        def keep(saved: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = saved.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return saved

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            loss = model(**inputs(job, documents=False))
        loss.backward()
        found.append(sum(kept.values()))
    return found


def test_as_much_is_kept_as_without() -> None:
    plain = Case("memory", 2, {"tp": 2}, {"micro_batch": 1, "global_batch": 1}, spec=SPEC).job()
    for without, with_overlap in on_ranks(kept_in_forward, 2, [plain, overlapped(plain)]):
        assert with_overlap <= without


def test_it_needs_a_stream_shared_along_the_sequence() -> None:
    assert check(overlapped(job_of(2, SPEC)), [tensor]) == []
    (problem,) = check(overlapped(job_of(2, SPEC, sequence_parallel=False)), [tensor])
    assert problem.key == "communication.tp_overlap"
    assert "layout.sequence_parallel = true" in problem.hint
