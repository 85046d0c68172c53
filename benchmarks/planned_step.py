"""What the planner promises of a small job on this machine, and what the job then takes.

    python benchmarks/planned_step.py [--ranks 4] [--steps 20] [--section.key value ...]

The machine is probed, the best job of the model `tiny` for so many ranks is written and trained as it is, and
the median step is compared with the promise. Nothing else should run beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import fivefold
from fivefold.bench.probe import probe
from fivefold.config import load
from fivefold.hardware.cluster import write_cluster
from fivefold.planner.request import Request
from fivefold.training.metrics import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = str(folder / "cluster.toml")
        write_cluster(probe(options.ranks).cluster, cluster)
        asked = Request.read(
            model="tiny", hf=None, cluster=cluster, gpus=str(options.ranks), seq_len=256, global_batch=32
        )
        found = asked.plan()
        assert found.best is not None
        (folder / "job.toml").write_text(asked.job_file(found))
        words = [f"--training.steps={options.steps}", "--checkpoint.keep=0", *overrides]
        fivefold.train(load(str(folder / "job.toml"), None, words), options.ranks, folder / "run")
        times = [record["step_time_s"] for record in read_metrics(folder / "run")][options.steps // 4 :]
        measured = statistics.median(times)
        told = {
            "layout": found.row(found.best)["layout"],
            "promised_s": round(found.best.step_time, 4),
            "measured_s": round(measured, 4),
            "error": round(found.best.step_time / measured - 1, 3),
        }
        print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
