"""AdamW's update and the gradient norm, beside the time that reading and writing their bytes takes at least.

    python -m benchmarks.optimizer_pass [JOB ...] [--repeats 20] [--small]

For each job, with gradients in bf16 (one micro-batch) and in float32 (several), and moments in fp32 and
bf16: the median seconds of the norm, of the update with clipping, and of both, each begun when the device has
nothing else to do, as in a step, which waits for the norm. At the copy rate: as many bytes as both must read
and write, at the rate at which this device copies a large tensor. `--small` tries a small model, on whatever
is there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from fivefold.comm.world import DeviceKind
from fivefold.config import Job, resolve
from fivefold.config.read import job_with
from fivefold.ledger.precision import BYTES
from fivefold.training.build import Built, build
from fivefold.training.norm import clipping, local_norm

JOBS = ("benchmarks/h200_1b.toml", "benchmarks/h200_8b_l8.toml")
SMALL = {"model.preset": "tiny", "model.layers": 1, "data.source": "random"}
ONE_MICRO_BATCH = {"training.precision": "bf16", "training.global_batch": 1, "training.micro_batch": 1}
STATES = {"fp32": "float32", "bf16": "bfloat16"}
GRADIENTS = ("bfloat16", "float32")
BAR = 1.25
"""How many times as long as at the copy rate both may take."""


class Row(NamedTuple):
    """Seconds of one job; `least`: of its bytes at the copy rate."""

    job: str
    gradients: str
    states: str
    parameters: int
    bytes_each: int
    norm: float
    update: float
    both: float
    least: float


def bytes_each(gradients: str, states: str) -> int:
    """Read and written for a parameter: its gradient twice, master and moments both ways, the bf16 copy."""
    return 2 * BYTES[gradients] + 2 * (BYTES["float32"] + 2 * BYTES[STATES[states]]) + BYTES["bfloat16"]


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median, after a few to warm up."""
    found = []
    for number in range(3 + repeats):
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        if number >= 3:
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_rate(device: torch.device, size: int, repeats: int) -> float:
    """Bytes a second, read and written, of copies of `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device, repeats)


def measured(job: Job, device: torch.device, states: str, repeats: int, rate: float) -> list[Row]:
    """With gradients in each width."""
    built = build(job, device)
    assert built.weights.narrow, "gradients in 16 bits are for one micro-batch a step"
    return [row(built, states, gradients, repeats, rate) for gradients in GRADIENTS]


def row(built: Built, states: str, gradients: str, repeats: int, rate: float) -> Row:
    masters, device = built.weights.masters, built.weights.masters[0].device
    generator = torch.Generator(device).manual_seed(0)
    for master in masters:
        master.grad = None
        master.grad = torch.empty_like(master, dtype=getattr(torch, gradients))
        master.grad.normal_(0.0, 1e-3, generator=generator)

    def norm() -> torch.Tensor:
        return clipping(local_norm(built.weights.collect_gradients()), 1.0)

    scale = norm()
    parameters = sum(master.numel() for master in masters)
    each = bytes_each(gradients, states)
    return Row(
        built.job.spec.name,
        gradients,
        states,
        parameters,
        each,
        norm=seconds(norm, device, repeats),
        update=seconds(lambda: built.optimizer.step(1e-4, scale), device, repeats),
        both=seconds(lambda: built.optimizer.step(1e-4, norm()), device, repeats),
        least=parameters * each / rate,
    )


def table(rows: list[Row]) -> str:
    lines = [
        "| model | gradients | moments | bytes | norm | update | both | at the copy rate | times that |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in rows:
        times = " | ".join(f"{1e3 * t:.2f} ms" for t in (each.norm, each.update, each.both, each.least))
        named = f"| {each.job} ({each.parameters / 1e6:,.0f}M) | {each.gradients} | {each.states}"
        lines.append(f"{named} | {each.bytes_each} | {times} | {each.both / each.least:.2f} |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=list(JOBS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(words)
    kind: DeviceKind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    rate = copy_rate(device, 2**20 if options.small else 2**32, options.repeats)
    paths = [None] if options.small else options.jobs
    rows: list[Row] = []
    for path in paths:
        for states in STATES:
            settings = (SMALL if path is None else {}) | ONE_MICRO_BATCH | {"optimizer.states": states}
            job = resolve(job_with(settings, path=path), 1, device=kind)
            rows += measured(job, device, states, options.repeats, rate)
    print(table(rows))
    print(f"\nCopy rate: {rate / 1e12:.3f} TB/s. The bar: {BAR} times what it takes at that rate.")


if __name__ == "__main__":
    main()
