"""Tokens per second of `fivefold train`, read from its own metrics.

    python benchmarks/train_step.py benchmarks/h200_1b.toml [--section.key value ...]

Runs the job as a user would and prints the median over steps 20 to 60: the first steps compile and warm up.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fivefold.training.metrics import read_metrics

FIRST, LAST = 20, 60


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fivefold", "train", *arguments, "--run", folder]
        subprocess.run(command, check=True)
        steady = [record for record in read_metrics(Path(folder)) if FIRST <= record["step"] <= LAST]
    figures = {
        key: statistics.median(record[key] for record in steady)
        for key in ("step_time_s", "tokens_per_s_per_device", "mfu", "hfu", "memory_gib")
        if all(record[key] is not None for record in steady)
    }
    figures |= {"steps": len(steady), "slowest_step_s": max(record["step_time_s"] for record in steady)}
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
