"""Draws collectives.png: bus bandwidth by number of servers, computed and as Hugging Face measured it.

python docs/pictures/collectives.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from fivefold.hardware.cluster import find_cluster
from fivefold.planner.time.collectives import NCCL, message_time

NODES = np.array([1, 2, 4, 8, 16, 32, 64])
MEASURED = {
    "all_reduce": (436, 362, 160, 100, 85, 65, 33),
    "all_gather": (250, 185, 119, 69, 55, 28, 11),
}
CURVES = (
    ("47 MB, crowding 0.45 (fitted to the dots)", 47e6, 0.45, "-"),
    ("47 MB, crowding 0.1 (the default)", 47e6, 0.1, "--"),
    ("1 GB, crowding 0.1", 1e9, 0.1, ":"),
)


def main() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), sharey=True, layout="constrained")
    ranks = 8 * NODES
    for axis, (operation, measured) in zip(axes, MEASURED.items(), strict=True):
        times = 2 if operation == "all_reduce" else 1
        for label, payload, crowding, style in CURVES:
            transport = replace(NCCL, crowding=crowding)
            seconds = message_time(find_cluster("dgx-h100"), operation, payload, ranks, 1, transport)
            axis.plot(
                NODES,
                times * payload * (ranks - 1) / ranks / seconds / 1e9,
                style,
                color="tab:blue",
                label=label,
            )
        axis.plot(NODES, measured, "o", color="tab:red", label="measured, mean")
        axis.set(xscale="log", yscale="log", xticks=NODES, xlabel="servers of 8 H100", title=operation)
        axis.set_xticklabels([str(node) for node in NODES])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="bus bandwidth, GB/s", yticks=(10, 20, 50, 100, 200, 500))
    axes[0].set_yticklabels(["10", "20", "50", "100", "200", "500"])
    axes[0].legend(fontsize=8, loc="lower left")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
