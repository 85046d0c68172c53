"""Compute of one rank of a large layout, alone on one device: forward and backward, with no other rank there.

    python benchmarks/rank_alone.py [--rank 0] [--steps 5] [--section.key value ...]

By default the first-stage rank of llama3-70b under tp 8 x pp 4: 20 of 80 layers, an eighth of each, with four
micro-batches of 8192 tokens under way. The process group is a fake one: a message costs nothing and changes
nothing, or copies the rank's own data. What the neighbours would send is random numbers. So the time is that
of the rank's own work, and the MFU is what would be reached if communication were free and no rank waited for
another.

Memory in bf16 without ZeRO, for the default: 2.3 billion parameters of 18 bytes are 41 GB (10 bytes, 23 GB,
here, as no optimizer step is taken), and activations of four micro-batches come on top.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fivefold.axes.checks import check
from fivefold.axes.layout import Layout, described
from fivefold.axes.runtime import ring
from fivefold.axes.stages import stages, stages_of
from fivefold.comm import collectives
from fivefold.comm.world import device_kind
from fivefold.config import Job, load, resolve
from fivefold.data.batch import Batch
from fivefold.hardware.devices import find_device
from fivefold.ledger.precision import precision_named
from fivefold.ledger.setup import Setup
from fivefold.models.flops import flops_per_token
from fivefold.problems import refuse
from fivefold.training.build import Built, build

DEFAULTS = [
    "--model.preset=llama3-70b",
    "--layout.tp=8",
    "--layout.pp=4",
    "--training.seq_len=8192",
    "--training.micro_batch=1",
    "--training.global_batch=8",
    "--training.precision=bf16",
]


@dataclass(frozen=True)
class Timed:
    """Seconds of each step, and whether every gradient was a finite number."""

    seconds: list[float]
    finite: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5)
    options, overrides = parser.parse_known_args()
    kind = device_kind()
    job = load(overrides=DEFAULTS + overrides)
    ranks = job.layout.pp * job.layout.tp * job.layout.cp * (job.layout.dp_shard or 1)
    job = resolve(job, ranks * (job.layout.dp_replicate or 1), kind)
    refuse(check(job))
    world = Layout.of(job).ranks
    dist.init_process_group("fake", store=FakeStore(), rank=options.rank, world_size=world)  # type: ignore[no-untyped-call]
    collectives.scattered = own_piece
    ring.Exchange = Kept  # type: ignore[misc, assignment, attr-defined]
    timed = run(job, torch.device(kind), options.steps)
    print(json.dumps(report(job, options.rank, timed), indent=2))


def run(job: Job, device: torch.device, steps: int) -> Timed:
    """Time forward and backward of this rank's micro-batches."""
    built = build(job, device)
    batches = random_batches(job, device)
    tokens = job.training.global_batch * job.training.seq_len
    built.step.backward(batches, tokens)  # makes buffers, picks kernels, compiles
    fill_receive_buffers(built)
    seconds = []
    for _ in range(steps):
        built.weights.clear_gradients()
        wait(device)
        started = time.perf_counter()
        built.step.backward(batches, tokens)
        wait(device)
        seconds.append(time.perf_counter() - started)
    finite = all(bool(torch.isfinite(gradient).all()) for gradient in built.weights.collect_gradients())
    return Timed(seconds, finite)


def own_piece(x: Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> Tensor:
    """In place of a reduce-scatter: the fake group of some torch versions leaves its result unwritten."""
    return x if group is None else x.chunk(group.size(), dim)[group.rank()].clone()


class Kept:
    """In place of what ring neighbours send each other: a rank keeps its own. What a fake group receives is
    left unwritten.
    """

    def __init__(self, x: Tensor, group: dist.ProcessGroup, to: int, source: int):
        self.x = x

    def wait(self) -> Tensor:
        return self.x


def random_batches(job: Job, device: torch.device) -> list[Batch]:
    """Whole sequences of random tokens, one document each."""
    assert job.training.micro_batch is not None
    shape = (job.training.micro_batch, job.training.seq_len)
    found = []
    for _ in range(int(Setup.of(job).micro_batches)):
        tokens, targets = torch.randint(job.spec.vocab_size, (2, *shape), device=device)
        found.append(Batch(tokens, targets, None, tokens.numel()))
    return found


def fill_receive_buffers(built: Built) -> None:
    """Nothing arrives: put what might have arrived into the buffers, once."""
    assert built.step.pipeline is not None, "this benchmark is about a rank of a pipeline"
    for stage in built.step.pipeline.stages:
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            for info in infos:
                buffer: Any = getattr(info, "buffer", None)
                if buffer is not None:
                    buffer.detach().normal_(std=1e-2)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(job: Job, rank: int, timed: Timed) -> dict[str, Any]:
    """The figures, with what they leave out."""
    layout = Layout.of(job)
    cut = stages(job)
    parts = [part for stage in stages_of(job, layout.place(rank).pp) for part in cut[stage]]
    layers = sum(part.startswith("blocks") for part in parts)
    each = flops_per_token(job.spec, job.training.seq_len)
    forward = (each.blocks + each.attention) * layers / job.spec.layers + each.head * ("head" in parts)
    tokens = int(Setup.of(job).micro_batches) * (job.training.micro_batch or 1) * job.training.seq_len
    flops = 3 * forward * tokens / (layout.tp * layout.cp)
    step = statistics.median(timed.seconds)
    on_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    device = find_device(name)
    peak = device and device.peak_flops.get(precision_named(job.training.precision).compute)
    return {
        "model": job.spec.name,
        "layout": described(job),
        "schedule": job.layout.schedule,
        "rank": rank,
        "layers": layers,
        "micro_batches": int(Setup.of(job).micro_batches),
        "recompute": job.training.recompute,
        "compile": job.training.compile,
        "device": name,
        "torch": torch.__version__,
        "step_s": step,
        "slowest_step_s": max(timed.seconds),
        "tflops": flops / step / 1e12,
        "mfu": flops / step / peak if peak else "unknown",
        "mfu_counts": "matrix products and causal attention of this rank; communication not included",
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else "unknown",
        "gradients_finite": timed.finite,
    }


if __name__ == "__main__":
    main()
