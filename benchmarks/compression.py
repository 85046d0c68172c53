"""Gradients in 8 bits: bytes on the wire, what the model loses, and what error feedback is good for.

    python -m benchmarks.compression [--steps 300] [--kind int8] [--layouts "zero 0" HSDP]

For zero 0, 1 and 3 and HSDP on four ranks of this machine, or some of them (two to three minutes each):

bytes     of a step's gradients, by the ledger, over those of float32; on four ranks and on eight
loss      on held-out documents after training `--preset tiny`, against training without compression
feedback  applied gradients of 100 steps, added up, less the true ones: without error feedback over with it

Exit 1 when bytes are above 0.27 (int8), a loss is off by more than 1%, or feedback gains less than 5 times.
"""

import argparse
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import torch

from fivefold import read_metrics
from fivefold.comm.world import World
from fivefold.config import Job, load, resolve
from fivefold.replay.account import account
from fivefold.training.build import build
from fivefold.training.ranks import run_ranks
from fivefold.training.run import corpus_of

RANKS, SUMMED = 4, 100
LAYOUTS = {
    "zero 0": ["--layout.zero=0"],
    "zero 1": ["--layout.zero=1"],
    "zero 3": ["--layout.zero=3"],
    "HSDP": ["--layout.zero=3", "--layout.dp_replicate=2"],
    "HSDP, replicas": ["--layout.zero=3", "--layout.dp_replicate=2", "--communication.compress_on=replicate"],
}
SMALL = ["--training.global_batch=32", "--training.seq_len=64", "--optimizer.lr=0.001"]
LARGEST = {"int8": 0.27, "bf16": 0.51}


def words_of(layout: str, kind: str, *more: str) -> list[str]:
    chosen = [word for word in LAYOUTS[layout] if kind != "none" or "compress_on" not in word]
    return [*chosen, *SMALL, *more, f"--communication.compress={kind}"]


def job_of(layout: str, kind: str, *more: str) -> Job:
    return load(None, "tiny", words_of(layout, kind, *more))


def gradient_bytes(job: Job, ranks: int, replicas_only: bool) -> float:
    """Bytes that a rank sends in a step to sum gradients: over all data ranks, or over replicas alone."""
    resolved = resolve(job, ranks)
    found = 0.0
    for message in account(resolved).messages:
        weights = message.operation == "all_gather" and "dp_shard" in message.group
        if message.phase != "backward" or weights or (replicas_only and message.group != "dp_replicate"):
            continue
        found += float(message.wire_bytes * message.count)
    return found


def held_out(words: list[str], steps: int) -> float:
    """The loss on held-out documents after some steps on four ranks."""
    settings = [f"--training.steps={steps}", f"--training.validate_every={steps}"]
    command = [sys.executable, "-m", "fivefold", "train", "--preset", "tiny", "--nproc", str(RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        more = ["--training.validate_batches=16", "--checkpoint.keep=0", "--run", str(run)]
        subprocess.run([*command, *words, *settings, *more], check=True, capture_output=True)
        found = [line.val_loss for line in read_metrics(run) if line.val_loss is not None]
    return float(found[-1])


def accumulated(world: World, jobs: dict[str, Job]) -> dict[str, float]:
    """How far the sum of all steps' gradients is from the true one, by job; weights stay as they are."""
    sums: dict[str, list[torch.Tensor]] = {}
    for name, job in jobs.items():
        built = build(job, world.device)
        mesh, size = built.mesh, built.step.micro_batch
        share = (mesh.data_rank, mesh.layout.data_ranks)
        with corpus_of(job).train_loader(job.training.global_batch, size, *share) as loader:
            for batches in islice(loader, SUMMED):
                built.step.backward(batches, built.step.count_tokens(batches))
                found = [gradient.double() for gradient in built.step.collect()]
                sums[name] = [a + b for a, b in zip(sums.get(name, found), found, strict=True)]
                built.weights.clear_gradients()
    true = sums.pop("true")
    return {
        name: float(sum((a - b).square().sum() for a, b in zip(values, true, strict=True)) ** 0.5)
        for name, values in sums.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--kind", choices=sorted(LARGEST), default="int8", help="communication.compress")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), metavar="NAME")
    asked = parser.parse_args()
    base = held_out(words_of("zero 0", "none"), asked.steps)
    print(f"held-out loss after {asked.steps} steps, not compressed: {base:.4f}")
    print(f"{'':16}{'bytes on 4':>12}{'on 8':>8}{'loss':>9}{'off by':>9}{'feedback':>10}")
    good = True
    for layout in asked.layouts:
        job, plain = job_of(layout, asked.kind), job_of(layout, "none")
        on = job.communication.compress_on == "replicate"
        shares = [gradient_bytes(job, n, on) / gradient_bytes(plain, n, on) for n in (RANKS, 2 * RANKS)]
        loss = held_out(words_of(layout, asked.kind), asked.steps)
        off = loss / base - 1
        without = job_of(layout, asked.kind, "--communication.error_feedback=false")
        jobs = {"true": plain, "with": job, "without": without}
        apart = run_ranks(accumulated, RANKS, {name: resolve(each, RANKS) for name, each in jobs.items()})[0]
        gain = apart["without"] / apart["with"]
        print(f"{layout:16}{shares[0]:12.3f}{shares[1]:8.3f}{loss:9.4f}{off:9.2%}{gain:9.1f}x", flush=True)
        good &= max(shares) <= LARGEST[asked.kind] and abs(off) <= 0.01 and gain >= 5
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
