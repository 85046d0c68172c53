"""Draws docs/pictures/memory.png: predicted against measured memory, and failures by predicted chance.

Run: python docs/pictures/memory.py
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from fivefold.backtest.memory_fit import Prediction, held_out
from fivefold.backtest.published import PublishedRun, read_runs

STACKS = {
    "nanotron": "#888888",
    "megatron-deepspeed": "#c0392b",
    "simumax": "#2471a3",
    "torchtitan": "#239b56",
    "zero-bubble": "#8e44ad",
    "internevo": "#d68910",
}


def main() -> None:
    runs, _ = read_runs()
    predicted = held_out(runs)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6))
    _scatter(left, runs, predicted)
    _reliability(right, runs, predicted)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


def _scatter(axes: plt.Axes, runs: list[PublishedRun], predicted: dict[int, Prediction]) -> None:
    for stack, colour in STACKS.items():
        rows = [r for r in runs if r.stack.startswith(stack) and r.ok and r.memory_gib]
        measured = [r.memory_gib for r in rows]
        axes.scatter(
            measured, [predicted[r.row].gib for r in rows], s=7, color=colour, label=stack, alpha=0.7
        )
    axes.plot([0.8, 180], [0.8, 180], color="black", lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, GiB", ylabel="predicted, GiB")
    axes.set_title("Model never seen in the fit", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _reliability(axes: plt.Axes, runs: list[PublishedRun], predicted: dict[int, Prediction]) -> None:
    rows = [r for r in runs if r.stack == "nanotron" and predicted[r.row].reason is None]
    chances = np.array([predicted[r.row].chance for r in rows])
    failed = np.array([not r.ok for r in rows])
    edges = np.array([0, 0.001, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0001])
    for low, high in pairwise(edges):
        inside = (chances >= low) & (chances < high)
        if inside.any():
            axes.scatter(chances[inside].mean(), failed[inside].mean(), s=30, color="#2471a3", zorder=3)
            axes.annotate(
                str(int(inside.sum())),
                (chances[inside].mean(), failed[inside].mean()),
                textcoords="offset points",
                xytext=(6, -10),
                fontsize=8,
            )
    axes.plot([0, 1], [0, 1], color="black", lw=0.8)
    axes.set(xlabel="predicted chance of running out", ylabel="part of the runs that failed")
    axes.set_title("Ultrascale runs that nanotron can start; how many, beside each point", fontsize=10)


if __name__ == "__main__":
    main()
