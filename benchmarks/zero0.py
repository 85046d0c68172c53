"""Three ways to replicate a model over ranks and sum its gradients, their steps taking turns in one run.

    python benchmarks/zero0.py [RANKS] [STEPS]

ours   fixed buckets, summed while backward runs (`comm.buckets`): what zero 0 is
fsdp   FSDP2 on a mesh of (ranks, 1): nothing sharded, gradients all-reduced a block at a time
ddp    torch's DistributedDataParallel (which a resumed run would round differently under)
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import islice

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fivefold.comm.world import World
from fivefold.config import Job, load, resolve
from fivefold.data.batch import Batch
from fivefold.models.decoder import Decoder
from fivefold.models.initial import initialise
from fivefold.training.build import build
from fivefold.training.ranks import run_ranks
from fivefold.training.run import corpus_of


def compare(world: World, job: Job, steps: int) -> dict[str, float]:
    """Median milliseconds of forward, backward and reduction on this rank, by way."""
    built = build(job, world.device)
    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("replicate", "shard"))
    models = {}
    for name in ("fsdp", "ddp"):
        model = Decoder(job.spec)
        initialise(model, job.spec, job.training.seed)
        models[name] = model
    for block in models["fsdp"].blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(models["fsdp"], mesh=mesh)
    wrapped = DistributedDataParallel(models["ddp"])
    ways: dict[str, Callable[[Batch], object]] = {
        "ours": lambda batch: built.step.backward([batch], batch.valid),
        "fsdp": lambda batch: backward(models["fsdp"], batch),
        "ddp": lambda batch: backward(wrapped, batch),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    size = built.step.micro_batch
    with corpus_of(job).train_loader(size * world.size, size, world.rank, world.size) as loader:
        for (batch,) in islice(loader, steps):
            for name, way in ways.items():
                started = time.perf_counter()
                way(batch)
                times[name].append(time.perf_counter() - started)
            built.weights.clear_gradients()
            for model in models.values():
                model.zero_grad()
    return {name: 1e3 * statistics.median(values[3:]) for name, values in times.items()}


def backward(model: nn.Module, batch: Batch) -> None:
    (model(**batch.inputs) / batch.valid).backward()


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    settings = [f"--training.global_batch={4 * ranks}", "--training.seq_len=128", "--layout.zero=0"]
    job = resolve(load(None, "tiny", settings), ranks)
    median = run_ranks(compare, ranks, job, steps)[0]
    print(json.dumps({"ranks": ranks, "steps": steps, "median_ms": median}, indent=2))


if __name__ == "__main__":
    main()
