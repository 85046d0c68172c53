"""What `fivefold train` costs on top of a loop written by hand, on one process.

    python benchmarks/overhead.py [--steps 200] [--section.key value ...]

Both train the same modules on the same batches and must print the same losses, bit for bit. Their steps
take turns in one run, so whatever else the machine does slows both alike. Each side's steps are timed from
end to end: batch, forward, backward, clipping, update, and for `train` also metrics and terminal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fivefold.comm.world import single_world
from fivefold.config import Job, load, resolve
from fivefold.models.decoder import Decoder
from fivefold.models.initial import initialise
from fivefold.training.learning_rate import learning_rate
from fivefold.training.run import TrainingRun, corpus_of


def by_hand(job: Job) -> Iterator[float]:
    """A plain training loop: yields the loss of each step."""
    model = Decoder(job.spec)
    initialise(model, job.spec, job.training.seed)
    parameters = list(model.parameters())
    settings = job.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
    size = job.training.global_batch
    with corpus_of(job).train_loader(global_batch=size, micro_batch=size) as batches:
        for step, (batch,) in enumerate(batches, start=1):
            loss = model(batch.tokens, batch.targets, batch.documents) / batch.valid
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, job.training.clip)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step, job.training.steps)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options, overrides = parser.parse_known_args()
    small = ["--training.global_batch=8", "--training.seq_len=128", "--checkpoint.keep=0"]
    steps = [f"--training.steps={options.steps}"]
    job = resolve(load(None, "tiny", [*small, *overrides, *steps]), 1)
    times: dict[str, list[float]] = {"train": [], "by_hand": []}
    with tempfile.TemporaryDirectory() as folder, TrainingRun(job, single_world("cpu"), Path(folder)) as run:
        hand = by_hand(job)
        turns: dict[str, Callable[[], float]] = {
            "train": lambda: run.advance()["loss"],
            "by_hand": lambda: next(hand),
        }
        for step in range(1, options.steps + 1):
            losses = {}
            for name in sorted(turns, reverse=bool(step % 2)):
                started = time.perf_counter()
                losses[name] = turns[name]()
                times[name].append(time.perf_counter() - started)
            if losses["train"] != losses["by_hand"]:
                sys.exit(f"step {step}: losses differ: {losses}")
    median = {name: statistics.median(values) for name, values in times.items()}
    total = {name: sum(values) for name, values in times.items()}
    print(
        json.dumps(
            {
                "steps": options.steps,
                "losses": "bit-equal",
                "median_step_ms": {name: round(1e3 * value, 2) for name, value in median.items()},
                "ratio_of_medians": round(median["train"] / median["by_hand"], 4),
                "ratio_of_totals": round(total["train"] / total["by_hand"], 4),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
