"""Two trainings beside each other on the cores of this machine: how fast is each, against one alone?

    python -m benchmarks.beside

Each trains `--preset tiny` on one process, with as many threads as there are cores. Alone, together, alone:
medians of the steps' tokens a second behind the first ones. With `--spinning` also as OpenMP would wait.
Exit 1 when one of the two has less than 40% of its speed alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS, WARM_UP = 40, 10
LEAST = 0.4
COMMAND = [sys.executable, "-m", "fivefold", "train", "--preset", "tiny", "--nproc", "1"]
SETTINGS = [
    *("--data.source", "random", "--training.steps", str(STEPS), "--training.validate_every", "0"),
    *("--checkpoint.every", "0"),
]


def start(folder: Path, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*COMMAND, "--run", str(folder), *SETTINGS],
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def speeds(names: list[str], environment: dict[str, str]) -> list[float]:
    """Tokens a second of trainings that run at the same time, one for each name."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / name for name in names]
        for process in [start(run, environment) for run in runs]:
            if process.wait():
                sys.exit(f"training ended with {process.returncode}")
        return [statistics.median(_rates(run)) for run in runs]


def _rates(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        line["tokens_per_s"] for line in lines if line.get("step", 0) > WARM_UP and "tokens_per_s" in line
    ]


def compared(name: str, environment: dict[str, str]) -> float:
    """Print the speeds; the slower of the two against the mean of one alone."""
    before = speeds(["alone"], environment)[0]
    together = speeds(["one", "other"], environment)
    after = speeds(["alone"], environment)[0]
    alone = (before + after) / 2
    print(f"{name:10} alone {before:,.0f} and {after:,.0f} tok/s; together ", end="")
    print(" and ".join(f"{speed:,.0f} ({speed / alone:.0%})" for speed in together), flush=True)
    return min(together) / alone


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spinning", action="store_true", help="also with threads that spin while they wait")
    given = parser.parse_args()
    share = compared("asleep", {})
    if given.spinning:
        compared("spinning", {"OMP_WAIT_POLICY": "active"})
    return int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
