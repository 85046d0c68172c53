"""What a model of 100 million parameters loses by computing in 8 bits: curves of held-out loss.

    python -m benchmarks.fp8_curves --json fp8.json --kinds bf16
    python -m benchmarks.fp8_curves --json fp8.json --kinds tensorwise rowwise --seeds 0 1
    python -m benchmarks.fp8_curves --json fp8.json --compare [--png FILE]

Trained by `fivefold train` on the standard library's text, by 16,384 symbols of a tokenizer trained on it;
steps of 65,536 tokens; all layers of the blocks in 8 bits, also those too small to gain by it (`fp8_small`).
Each kind and seed is a run of its own, kept in the file when it is through; `--minutes` stops a run with a
checkpoint, and the same command goes on with it. `--compare` prints the last losses beside bf16's of the same
seed, and exits with 1 when one is off by more than 1%, or when a run is missing.

`benchmarks/fp8_learns.py` is the same of a tiny model on a CPU. `--small`: a small one, to see that it runs.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.trained import environment, machine, shrunk, words_of
from fivefold.problems import BadInput, Problem, refuse, unwritable
from fivefold.report.figures import pyplot, save
from fivefold.report.table import as_table
from fivefold.training.metrics import read_metrics

BASE = "bf16"
KINDS: dict[str, Mapping[str, object]] = {
    BASE: {},
    "tensorwise": {"training.fp8": "tensorwise", "training.fp8_small": "true"},
    "rowwise": {"training.fp8": "rowwise", "training.fp8_small": "true"},
}
JOB: dict[str, object] = {
    "model.name": "100m",
    "model.vocab_size": 16384,
    "model.dim": 768,
    "model.layers": 12,
    "model.heads": 12,
    "model.kv_heads": 12,
    "model.ffn": 2048,
    "model.max_seq_len": 1024,
    "model.tied": "true",
    "data.source": "stdlib",
    "data.tokenizer": "bpe-16384",
    "data.heldout": 0.05,
    "training.seq_len": 1024,
    "training.global_batch": 64,
    "training.precision": "bf16",
    "training.compile": "true",
    "training.validate_batches": 6,
    "optimizer.lr": 1e-3,
    "optimizer.warmup": 100,
    "checkpoint.keep": 1,
    "checkpoint.minutes": 0,
    "run.tensorboard": "false",
}
SMALL: dict[str, object] = {"data.source": str(Path(asyncio.__file__).parent), "data.tokenizer": "bpe-320"}
SMALL |= {"training.global_batch": 4, "training.validate_batches": 1}
POINTS = 20
"""Of a curve: how often held-out loss is computed."""
MOST = 0.01
PATIENCE_S = 120.0

Curve = list[tuple[int, float]]
"""Steps and the held-out loss after them."""


def settings_of(kind: str, seed: int, steps: int, small: bool) -> dict[str, object]:
    """The keys of a run's job."""
    every = {"training.steps": steps, "training.validate_every": max(1, steps // POINTS)}
    settings = {**JOB, **KINDS[kind], **every, "training.seed": seed}
    return {**shrunk(settings), **SMALL} if small else settings


def trained(words: Sequence[str], folder: Path, compiled_in: str | None, limit_s: float | None) -> bool:
    """Go on with the run in a folder: whether it is through. After a time it stops, with a checkpoint."""
    command = [sys.executable, "-m", "fivefold", "train", *words, "--run", str(folder)]
    with subprocess.Popen(command, env=environment(compiled_in), stdout=2) as process:
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(PATIENCE_S)
            return False
    if code:
        raise RuntimeError(f"it ended with {code}: {' '.join(command)}")
    return True


def curve_of(folder: Path) -> Curve:
    records = read_metrics(folder)
    return [(line["step"], line["val_loss"]) for line in records if line.get("val_loss") is not None]


def compared(curves: Mapping[str, Curve], seeds: Sequence[int]) -> tuple[list[list[str]], bool]:
    """Rows of the last losses, and whether all are there and within what is allowed."""
    rows, good = [], True
    for seed in seeds:
        base = curves.get(f"{BASE}-{seed}")
        for kind in KINDS:
            curve = curves.get(f"{kind}-{seed}")
            if curve is None or base is None:
                rows.append([kind, str(seed), *([f"{curve[-1][1]:.4f}"] if curve else ["missing"]), ""])
                good = False
                continue
            off = curve[-1][1] / base[-1][1] - 1
            good &= abs(off) <= MOST
            rows.append([kind, str(seed), f"{curve[-1][1]:.4f}", f"{off:+.2%}"])
    return rows, good


def draw(curves: Mapping[str, Curve], path: str) -> None:
    """Held-out loss by steps, one line for each run."""
    figure, axes = pyplot().subplots(figsize=(7, 4))
    for name, curve in curves.items():
        kind, _, seed = name.rpartition("-")
        style = dict(zip(KINDS, ("-", "--", ":"), strict=True))[kind]
        axes.plot(*zip(*curve, strict=True), style, label=f"{kind}, seed {seed}")
    axes.set(xlabel="step", ylabel="held-out loss")
    axes.legend()
    save(figure, path)


def compare(figures: Mapping[str, Any], seeds: Sequence[int], png: str | None) -> int:
    """Print the last losses, and draw the curves; the exit code."""
    rows, good = compared(figures["curves"], seeds)
    if png:
        draw(figures["curves"], png)
    print(figures.get("on", ""))
    print(as_table(["kind", "seed", "held out", "off by"], rows))
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", metavar="FILE", required=True, help="where curves are kept")
    parser.add_argument("--runs", metavar="FOLDER", default="runs/fp8-curves", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, help="of one call: then stop with a checkpoint")
    parser.add_argument("--compare", action="store_true", help="train nothing: what is kept, side by side")
    parser.add_argument("--png", metavar="FILE", help="with --compare: draw the curves")
    parser.add_argument("--small", action="store_true", help="a small model, on whatever there is")
    parser.add_argument("--compiled-in", metavar="FOLDER", help="keep what is compiled there")
    asked, overrides = parser.parse_known_args()
    try:
        refuse([*unwritable(asked.json, "--json"), *unwritable(asked.png, "--png")])
        if asked.compare and overrides:
            refuse([Problem("--compare", f"takes no {overrides[0]}", "Nothing is trained: leave it out.")])
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    kept = Path(asked.json)
    figures: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"curves": {}}
    if asked.compare:
        return compare(figures, asked.seeds, asked.png)
    ends = None if asked.minutes is None else time.monotonic() + 60 * asked.minutes
    figures["on"] = str(machine())
    for seed, kind in product(asked.seeds, asked.kinds):
        name = f"{kind}-{seed}"
        if name in figures["curves"]:
            continue
        words = [*words_of(settings_of(kind, seed, asked.steps, asked.small)), *overrides]
        left = None if ends is None else max(1.0, ends - time.monotonic())
        if not trained(words, Path(asked.runs) / name, asked.compiled_in, left):
            print(f"{name}: stopped after so many minutes. The same command goes on with it.")
            return 1
        curve = figures["curves"][name] = curve_of(Path(asked.runs) / name)
        kept.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"{name}: held out {curve[-1][1]:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
