"""Draws docs/pictures/scaling.png: loss along lines of equal compute, and where each fit has its minimum.

Run: python docs/pictures/scaling.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from fivefold.planner.scaling import FITS, optimum

BUDGETS = (1e21, 1e22, 1e23, 1e24, 1e25)
SHOWN = {"besiroglu-2024": "#0969da", "hoffmann-2022-unrounded": "#bf8700", "hoffmann-2022": "#cf222e"}


def main() -> None:
    figure, (curves, ratios) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    fit = FITS["besiroglu-2024"]
    for shade, budget in zip(np.linspace(0.35, 1.0, len(BUDGETS)), BUDGETS, strict=True):
        params = np.geomspace(1e8, 3e12, 400)
        losses = np.array([fit.loss(count, budget / 6 / count) for count in params])
        best = optimum(compute=budget, fit=fit)
        near = losses < best.loss + 0.35
        curves.plot(params[near], losses[near], color="#0969da", alpha=shade)
        curves.plot(best.params, best.loss, "o", color="#0969da", markersize=5)
        label = f"$10^{{{np.log10(budget):.0f}}}$"
        curves.annotate(
            label, (best.params, best.loss), xytext=(0, 8), textcoords="offset points", ha="center"
        )
    curves.set(
        xscale="log", xlabel="parameters", ylabel="loss", title="Loss at equal compute (besiroglu-2024)"
    )
    curves.set_ylim(bottom=1.8)
    budgets = np.geomspace(1e20, 1e26, 100)
    for name, colour in SHOWN.items():
        found = [optimum(compute=budget, fit=FITS[name]).tokens_per_param for budget in budgets]
        ratios.plot(budgets, found, color=colour, label=name)
    ratios.axhline(20, color="#57606a", linestyle=":", label="the rule of 20")
    ratios.plot(5.76e23, 1.4e12 / 70e9, "D", color="#1f2328", label="Chinchilla, 70B on 1.4T")
    ratios.plot(3.8e25, 15.6e12 / 405e9, "s", color="#1f2328", label="Llama 3, 405B on 15.6T")
    ratios.set(xscale="log", yscale="log", xlabel="operations", title="Tokens a parameter at the optimum")
    ticks = [10, 20, 50, 100, 200]
    ratios.set_yticks(ticks, [str(tick) for tick in ticks])
    ratios.minorticks_off()
    ratios.set_ylim(9, 260)
    ratios.legend(frameon=False, fontsize=8.5, loc="upper left")
    for axes in (curves, ratios):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main()
