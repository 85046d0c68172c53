"""`make demo`: train a small model on four ranks of this machine, then say what happened and what to try."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path

import fivefold
from fivefold.problems import BadInput
from fivefold.training.failures import RanksFailed

JOB = Path(__file__).with_name("demo.toml")

CLOSING = """
What happened: {ranks} processes on this machine trained one language model of {parameters:,} parameters,
byte by byte, on the source code of Python's standard library. Each held a quarter of the weights, gradients
and optimizer states (ZeRO-3), saw its own quarter of every batch, and gathered each layer just before use.
In {steps} steps, {tokens:,} bytes and {seconds:.0f} seconds the loss fell from {first:.2f} nats per byte
in the first step to {val_loss:.2f} on files it had never seen (guessing among 256 bytes is 5.55).

Everything about the run is in {folder}: job.toml, metrics.jsonl, tensorboard/, checkpoints/.

Try next:
  .venv/bin/fivefold verify --preset tiny --nproc 4 --layout.zero 3    # the same numbers as one process?
  .venv/bin/fivefold train {job} --layout.zero 2   # split another way, the same losses
  .venv/bin/fivefold train {job} --run {folder} --training.steps 300   # take this run up
"""


def main() -> None:
    started = time.perf_counter()
    folder = Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    job = fivefold.load_job(str(JOB), None, [])
    try:
        summary = fivefold.train(job, run=folder)
    except BadInput as error:
        sys.exit(f"{error}")
    except RanksFailed as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    from fivefold.models.inventory import parameter_count
    from fivefold.training.metrics import read_metrics

    assert summary.val_loss is not None
    print(
        CLOSING.format(
            ranks=4,
            parameters=parameter_count(job.spec),
            steps=summary.steps,
            tokens=summary.tokens,
            seconds=time.perf_counter() - started,
            first=read_metrics(folder)[0]["loss"],
            val_loss=summary.val_loss,
            folder=folder,
            job=JOB.relative_to(Path.cwd()) if JOB.is_relative_to(Path.cwd()) else JOB,
        )
    )


if __name__ == "__main__":
    main()
