"""Whether a faster device is ever planned to be slower: a search for every peak rate of a range.

    python -m benchmarks.plan_peaks
    python -m benchmarks.plan_peaks --model llama3.2-1b --gpus 4 --step 10

The device is an H100 but for its peak, which goes up by `--step` TFLOP/s at a time. Prints where the best
layout changes, and by how much a step is longer than at any lower peak; exit code 1 where that is over 0.5%.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from fivefold.hardware.cluster import Cluster
from fivefold.planner.request import Request
from fivefold.planner.search.best import search

ALLOWED = 1.005


def with_peak(cluster: Cluster, teraflops: float) -> Cluster:
    """The cluster with another peak rate, in every dtype."""
    peaks = dict.fromkeys(cluster.device.peak_flops, 1e12 * teraflops)
    return replace(cluster, device=replace(cluster.device, name="drawn", peak_flops=peaks))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--model", default="llama3-8b")
    options.add_argument("--gpus", type=int, default=8)
    options.add_argument("--cluster", default="dgx-h100")
    for name, usual in (("--lowest", 300), ("--highest", 2500), ("--step", 1)):
        options.add_argument(name, type=int, default=usual)
    asked = options.parse_args()
    request = Request(model=asked.model, hf=None, cluster=asked.cluster, gpus=asked.gpus, compile=True)
    goal, cluster = request.goal(asked.gpus), request.machines
    shortest, worst, shown = float("inf"), 0.0, ""
    for teraflops in range(asked.lowest, asked.highest + 1, asked.step):
        best = search(goal, with_peak(cluster, teraflops), best=1).best[0]
        worst, shortest = max(worst, best.step_time / shortest), min(shortest, best.step_time)
        if best.keys != shown:
            shown = best.keys
            print(f"{teraflops:5} TFLOP/s: {best}", flush=True)
    print(f"longest beside a lower peak: {worst - 1:+.4%}")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
