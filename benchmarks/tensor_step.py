"""Tensor parallelism two ways on the same model, their steps taking turns in one run.

    python benchmarks/tensor_step.py [RANKS] [STEPS] [SEQUENCES] [SEQ_LEN]

ours         `axes.tensor`: DTensor parameters, layers on local tensors with explicit messages
parallelize  torch's `parallelize_module`, with sequence and loss parallelism: layers on DTensors

A step is forward and backward, eagerly, of the preset `tiny`; what comes after is the same for both. So are
matrix products and messages: the more tokens in a step, the less the rest of it matters.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fivefold.axes.layout import Layout
from fivefold.axes.runtime import tensor_split
from fivefold.axes.runtime.data_split import local_slab
from fivefold.axes.runtime.mesh import Mesh
from fivefold.comm.world import World
from fivefold.config import Job, load, resolve
from fivefold.models.decoder import Decoder
from fivefold.models.initial import initial_values
from fivefold.training.ranks import run_ranks

WARM_UP = 3


def ours(job: Job, mesh: Mesh) -> Decoder:
    with torch.device("meta"):
        model = Decoder(job.spec)
    tensor_split.split(model, mesh, job)
    model.to_empty(device="cpu")
    fill(model, job)
    return model


def parallelized(job: Job, devices: DeviceMesh) -> Decoder:
    with torch.device("meta"):
        model = Decoder(job.spec)
    plan = {
        "embedding.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head.norm": SequenceParallel(),
        "head.output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, devices, plan)
    for block in model.blocks.values():
        parallelize_module(
            block,
            devices,
            {
                "attention_norm": SequenceParallel(),
                # Gathered once for query, key and value; the context stays as it is.
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.output": RowwiseParallel(output_layouts=Shard(1)),
                "mlp_norm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    model.to_empty(device="cpu")
    fill(model, job)
    return model


@torch.no_grad()
def fill(model: nn.Module, job: Job) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        offset, shape = local_slab(parameter)
        values = initial_values(job.spec, name, tuple(parameter.shape), job.training.seed, offset, shape)
        parameter.to_local().copy_(values)


def compare(world: World, job: Job, steps: int) -> dict[str, float]:
    """Median milliseconds of forward and backward on this rank, by way."""
    mesh = Mesh(Layout.of(job), world.device)
    models = {"ours": ours(job, mesh), "parallelize": parallelized(job, mesh.along("tp"))}
    rows, length = job.training.micro_batch or 1, job.training.seq_len
    generator = torch.Generator().manual_seed(0)

    def step_of_ours(tokens: Tensor, targets: Tensor) -> float:
        loss = models["ours"](tokens, targets) / targets.numel()
        loss.backward()
        return float(loss.detach())

    def step_of_theirs(tokens: Tensor, targets: Tensor) -> float:
        with loss_parallel():
            loss = models["parallelize"](tokens, targets) / targets.numel()
            loss.backward()
        return float(loss.detach().full_tensor())

    ways: dict[str, Callable[[Tensor, Tensor], float]] = {
        "ours": step_of_ours,
        "parallelize": step_of_theirs,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(WARM_UP + steps):
        sequence = torch.randint(job.spec.vocab_size, (rows, length + 1), generator=generator)
        losses = {}
        for name, way in ways.items():
            models[name].zero_grad()
            started = time.perf_counter()
            losses[name] = way(sequence[:, :-1], sequence[:, 1:])
            times[name].append(time.perf_counter() - started)
        assert abs(losses["ours"] - losses["parallelize"]) < 1e-5, losses
    _assert_same_gradients(models)
    return {name: 1e3 * statistics.median(values[WARM_UP:]) for name, values in times.items()}


def _assert_same_gradients(models: dict[str, Decoder]) -> None:
    """Of the last step; those that are the same on all ranks only once summed (norms') are left out."""
    theirs = dict(models["parallelize"].named_parameters())
    for name, parameter in models["ours"].named_parameters():
        gradient, other = parameter.grad, theirs[name].grad
        assert isinstance(gradient, DTensor)
        assert isinstance(other, DTensor)
        if gradient.placements == other.placements and gradient.placements != (Replicate(),):
            torch.testing.assert_close(gradient.to_local(), other.to_local(), rtol=1e-3, atol=1e-6)


def main() -> None:
    defaults = [2, 50, 2, 128]
    given = [int(argument) for argument in sys.argv[1:]]
    ranks, steps, sequences, length = given + defaults[len(given) :]
    settings = [
        f"--training.global_batch={sequences}",
        f"--training.seq_len={length}",
        f"--layout.tp={ranks}",
    ]
    job = resolve(load(None, "tiny", settings), ranks)
    median = run_ranks(compare, ranks, job, steps)[0]
    result = {
        "ranks": ranks,
        "steps": steps,
        "sequences": sequences,
        "seq_len": length,
        "median_ms": median,
        "ratio": median["ours"] / median["parallelize"],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
