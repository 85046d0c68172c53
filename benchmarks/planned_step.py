"""What the planner promises of a small job on this machine, and what the job then takes.

    python benchmarks/planned_step.py [--ranks 4] [--steps 20] [--section.key value ...]
    python benchmarks/planned_step.py --ranks 1 --model llama3.2-1b --seq-len 8192 --global-batch 4

The machine is probed, the best job of the model for so many ranks is written and trained as it is, and the
median step is compared with the promise; on a GPU also the memory. Nothing else should run beside it.
Settings given change the job after it was planned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

import fivefold
from fivefold.bench.probe import probe
from fivefold.config import dump_toml, load
from fivefold.hardware.cluster import write_cluster
from fivefold.planner.request import Request
from fivefold.training.metrics import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--global-batch", type=int, default=32)
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = str(folder / "cluster.toml")
        write_cluster(probe(options.ranks).cluster, cluster)
        asked = Request(
            model=options.model,
            hf=None,
            cluster=cluster,
            gpus=str(options.ranks),
            seq_len=options.seq_len,
            global_batch=options.global_batch,
        )
        found = asked.answer()
        assert found.best is not None
        (folder / "job.toml").write_text(dump_toml(asked.job(found)))
        words = [f"--training.steps={options.steps}", "--checkpoint.keep=0", *overrides]
        fivefold.train(load(str(folder / "job.toml"), None, words), options.ranks, folder / "run")
        records = read_metrics(folder / "run")
        measured = statistics.median(record["step_time_s"] for record in records[options.steps // 4 :])
        row = found.row(found.best)
        told = {
            "layout": row["layout"] | row["training"],
            "promised_s": round(found.best.step_time, 4),
            "measured_s": round(measured, 4),
            "error": round(found.best.step_time / measured - 1, 3),
        }
        if torch.cuda.is_available():
            told["promised_gib"] = round(float(found.best.memory.allocated) / 2**30, 2)
            told["measured_gib"] = round(records[-1]["memory_gib"], 2)
        print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
