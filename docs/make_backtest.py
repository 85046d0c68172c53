"""Draw docs/pictures/backtest.png: predicted against measured step times of the published runs.

python docs/make_backtest.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from fivefold.backtest.outcomes import DENSE, DGXC, PLAYBOOK, ZERO_BUBBLE, promise_of
from fivefold.backtest.published import read_runs
from fivefold.backtest.time_fit import left_out, predicted_times

PICTURE = Path(__file__).parent / "pictures" / "backtest.png"
GROUPS = (
    ("other dense A100 and H100", DENSE, "#4878a8", 8),
    ("HF playbook, pp = 1, tp ≤ 8, ≤ 128 GPUs", PLAYBOOK, "#6aa56e", 14),
    ("Zero Bubble tables", ZERO_BUBBLE, "#c86f4a", 22),
    ("NVIDIA dgxc, H100", DGXC, "#2b2b2b", 22),
)


def main() -> None:
    runs, _ = read_runs()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), gridspec_kw={"width_ratios": [1, 1]})
    for name, promise, colour, size in GROUPS:
        some = [run for run in runs if promise_of(run) == promise and run.ok and run.step_time]
        honest = predicted_times(some, left_out)
        measured = [run.step_time or 0.0 for run in some]
        left.scatter(measured, honest, s=size, color=colour, alpha=0.6, linewidths=0, label=name)
        errors = sorted(abs(time / took - 1) for time, took in zip(honest, measured, strict=True))
        share = [(number + 1) / len(errors) for number in range(len(errors))]
        right.plot([100 * error for error in errors], share, color=colour, linewidth=2, label=name)
    low, high = 0.02, 400
    left.plot([low, high], [low, high], color="#888888", linewidth=0.8, zorder=0)
    left.fill_between(
        [low, high], [low / 1.1, high / 1.1], [low * 1.1, high * 1.1], color="#dddddd", zorder=0
    )
    left.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    left.set(xlabel="measured step, seconds", ylabel="predicted step, seconds (group left out)")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    right.set(xlim=(0, 40), ylim=(0, 1), xlabel="error, %", ylabel="part of the runs with at most this error")
    right.grid(color="#eeeeee")
    right.legend(frameon=False, fontsize=8, loc="lower right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    main()
