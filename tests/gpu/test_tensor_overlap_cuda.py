"""Torch's fused operators on symmetric memory. Two processes share the card; other messages go over gloo."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fivefold.axes.layout import Layout
from fivefold.axes.runtime import tensor_split
from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.runtime.tensor_overlap import gather_matmul, matmul_scatter
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.models.decoder import Decoder
from fivefold.training.ranks import run_ranks
from fivefold.training.recompute import apply_recompute
from fivefold.verification import ROUNDING, gradient_error
from tests.axes.test_tensor import (
    ONE_KEY_HEAD,
    PARALLEL,
    Found,
    compute,
    fill,
    inputs,
    job_of,
    put_together,
    whole_model,
)
from tests.axes.test_tensor_overlap import overlapped
from tests.cases import TIED

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(120),
]

DEVICE = torch.device("cuda", 0)


def share_the_card() -> None:
    """Let two ranks of one GPU see each other's memory: torch takes that for a mistake unless told."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # is between GPUs
    torch.cuda.set_device(DEVICE)


def gloo_mesh(job: Job) -> Mesh:
    """The mesh of tp ranks alone, on the world's gloo group: a mesh of its own would make one with NCCL."""
    assert dist.group.WORLD is not None
    mesh = Mesh(Layout.of(job), torch.device("cpu"))
    mesh.meshes["tp"] = DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh_dim_names=("tp",))
    return mesh


# --- the operators alone -----------------------------------------------------------------------------------

SHAPES = [(512, 1, 256, (384, 128, 128)), (40, 3, 72, (56,))]  # tokens of a rank, batch, in, outs


def rank_inputs(rank: int, number: int) -> tuple[Tensor, list[Tensor]]:
    """A rank's tokens [n, B, in], and its weights [out, in]."""
    tokens, batch, width, outs = SHAPES[number]
    generator = torch.Generator().manual_seed(10 * number + rank)
    x = torch.randn(tokens, batch, width, generator=generator, dtype=torch.float64)
    return x, [torch.randn(out, width, generator=generator, dtype=torch.float64) for out in outs]


def operator_errors(world: World, dtype: torch.dtype) -> list[float]:
    """The worst errors of what the operators give, relative to the largest number there."""
    share_the_card()
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    errors = []
    for number in range(len(SHAPES)):
        by_rank = [rank_inputs(rank, number) for rank in range(world.size)]
        x, weights = by_rank[world.rank]
        whole = torch.cat([x for x, _ in by_rank])
        expected = [whole, *(whole @ weight.t() for weight in weights)]
        matrices = [weight.to(DEVICE, dtype).t() for weight in weights]
        found = gather_matmul(x.to(DEVICE, dtype), matrices, group)

        partial = [torch.cat([x] * world.size) @ weights[0].t() for x, weights in by_rank]
        expected.append(sum(partial[1:], partial[0]).chunk(world.size)[world.rank])
        found.append(matmul_scatter(torch.cat([x] * world.size).to(DEVICE, dtype), matrices[0], group))
        assert all(f.is_contiguous() for f in found)
        errors += [
            float((f.cpu().double() - e).abs().max() / e.abs().max())
            for f, e in zip(found, expected, strict=True)
        ]
    return errors


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 2e-2)])
def test_operators(dtype: torch.dtype, tolerance: float) -> None:
    for errors in run_ranks(operator_errors, 2, dtype):
        assert max(errors) <= tolerance


# --- in a model --------------------------------------------------------------------------------------------

SPECS: dict[str, dict[str, Any]] = {
    "biases": TIED,
    "parallel block": PARALLEL,
    "one key head": ONE_KEY_HEAD,
}


def on_gpu(job: Job) -> dict[str, Tensor]:
    return {key: value.to(DEVICE) for key, value in inputs(job, documents=False).items()}


def split_gradients(world: World, jobs: list[Job], dtype: torch.dtype) -> list[Found]:
    share_the_card()
    found = []
    for job in jobs:
        mesh = gloo_mesh(job)
        with torch.device("meta"):
            model = Decoder(job.spec).to(dtype)
        tensor_split.split(model, mesh, job)
        apply_recompute(model, job.training.recompute)
        model.to_empty(device=DEVICE)
        fill(model, mesh.layout.tp, mesh.place.tp)
        result = compute(model, on_gpu(job))
        found.append(Found(result.loss, in_float64(result.gradients)))
    return found


def in_float64(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient.cpu().double() for name, gradient in gradients.items()}


def found_and_expected(jobs: dict[str, Job], dtype: torch.dtype) -> dict[str, tuple[Found, Found]]:
    """For each job what two ranks find together, and what one process does in float64, on the same GPU.

    (Rotary angles are float32, and not the same on a CPU.)
    """
    by_rank = run_ranks(split_gradients, 2, list(jobs.values()), dtype)
    results = {}
    for index, (name, job) in enumerate(jobs.items()):
        first, second = (found[index] for found in by_rank)
        assert first.loss == second.loss
        together = Found(first.loss, put_together(job, [first.gradients, second.gradients]))
        reference = compute(whole_model(job.spec).to(DEVICE), on_gpu(job))
        results[name] = together, Found(reference.loss, in_float64(reference.gradients))
    return results


def test_gradients_in_float64_are_those_of_one_process() -> None:
    jobs = {
        f"{name}, recompute {mode}": overlapped(job_of(2, spec, recompute=mode))
        for name, spec in SPECS.items()
        for mode in ("none", "full", "selective")
    }
    for name, (found, expected) in found_and_expected(jobs, torch.float64).items():
        assert found.loss == pytest.approx(expected.loss, rel=1e-12), name
        error, worst = gradient_error(found.gradients, expected.gradients)
        assert error <= ROUNDING, f"{name}: {worst}"


def distance(found: Found, expected: Found) -> float:
    """Of all gradients together: one that should be 0, as that of a key bias, is nothing but rounding."""
    off = [found.gradients[name] - gradient for name, gradient in expected.gradients.items()]
    return math.sqrt(
        sum(float(gradient.square().sum()) for gradient in off)
        / sum(float(gradient.square().sum()) for gradient in expected.gradients.values())
    )


def test_gradients_in_bfloat16_err_little_more_than_without_overlap() -> None:
    jobs = {name: job_of(2, spec) for name, spec in SPECS.items()}
    plain = found_and_expected(jobs, torch.bfloat16)
    overlap = found_and_expected({name: overlapped(job) for name, job in jobs.items()}, torch.bfloat16)
    for name in jobs:
        assert distance(*overlap[name]) <= 1.5 * distance(*plain[name]) <= 0.2, name
