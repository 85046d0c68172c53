"""Draws docs/pictures/goodput.png: goodput by interval and by number of GPUs.

Run: python docs/pictures/goodput.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from fivefold.planner.goodput import Campaign, checkpoint_seconds, daly_goodput, play, simulate_run

STEP = 6.0
PARAMETERS = 405e9
COLOURS = {"of use": "#0969da", "checkpoints": "#bf8700", "repeated work": "#8250df", "restarts": "#cf222e"}


def campaign(gpus: int) -> Campaign:
    """54 days' worth of steps on 16,384 GPUs, shared out over `gpus`."""
    steps = round(54 * 86_400 / STEP * 16_384 / gpus)
    return Campaign(STEP, steps, gpus, checkpoint_seconds=checkpoint_seconds(PARAMETERS, gpus))


def main() -> None:
    figure, (by_interval, by_gpus) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    case = campaign(16_384)
    between = case.seconds_between_failures
    for checkpoint, colour in ((4.25, "#0969da"), (60.0, "#bf8700"), (300.0, "#cf222e")):
        each = Campaign(STEP, case.steps, case.gpus, checkpoint_seconds=checkpoint, rate_spread=0.0)
        smooth = np.geomspace(20, 12_000, 200)
        formula = [daly_goodput(interval, checkpoint, each.restart_seconds, between) for interval in smooth]
        by_interval.plot(smooth / 60, formula, color=colour, label=f"{checkpoint:g} s to write")
        for steps in np.unique(np.geomspace(4, 2000, 12).astype(int)):
            goodput = each.work / play(each, int(steps), 100).seconds.mean()
            by_interval.plot(steps * STEP / 60, goodput, "o", color=colour, markersize=3.5)
        best = simulate_run(each, runs=200)
        by_interval.plot(best.interval_seconds / 60, best.goodput, "*", color=colour, markersize=13)
    by_interval.set(xscale="log", xlabel="minutes between checkpoints", ylabel="goodput", ylim=(0.4, 1))
    by_interval.set_title("16,384 GPUs: Daly's formula (lines), simulation (dots)", fontsize=10.5)
    by_interval.set_xticks([0.5, 1, 5, 20, 60, 180], ["½", "1", "5", "20", "60", "180"])
    by_interval.minorticks_off()
    by_interval.legend(frameon=False, loc="upper right")

    counts = np.array([1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072])
    found = [simulate_run(campaign(int(gpus)), runs=300) for gpus in counts]
    parts = [
        [one.goodput for one in found],
        [one.checkpoints for one in found],
        [one.repeated for one in found],
        [one.restarts for one in found],
    ]
    by_gpus.stackplot(counts, parts, labels=list(COLOURS), colors=list(COLOURS.values()), alpha=0.75)
    by_gpus.set(xscale="log", xlabel="GPUs", ylim=(0.4, 1), xlim=(counts[0], counts[-1]))
    by_gpus.set_xticks(counts[::2], [f"{count:,}" for count in counts[::2]])
    by_gpus.minorticks_off()
    by_gpus.set_title("Where the time goes, at Llama 3's failure rate", fontsize=10.5)
    by_gpus.legend(frameon=False, loc="lower left")
    for axes in (by_interval, by_gpus):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main()
