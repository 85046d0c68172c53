"""How much faster a step could be than the one that `plan` finds: the same candidates, played by brute force.

    python -m benchmarks.plan_regret
    python -m benchmarks.plan_regret 8b@8 --most 20000

Every candidate of the search is bounded. All that may fit and whose bound is within 1.3 times the best of the
plan are played, in memory and time: nothing is left out because of what was found before.
Where there are more than `--most`, the least bounds are played and as many again are drawn from the rest.
Regret: the plan's best step over the fastest that fits. Exit code 1 where it is over 0.5%.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.plan_agrees import REQUESTS
from fivefold.hardware.cluster import Cluster
from fivefold.ledger.setup import Setup
from fivefold.planner.goal import Goal
from fivefold.planner.memory.fullest_rank import GIB, counted_on, fits, memory
from fivefold.planner.play.arrays import taken
from fivefold.planner.play.step_time import step_times
from fivefold.planner.play.timed import Timed
from fivefold.planner.search.best import search
from fivefold.planner.search.bounds import least_with_messages
from fivefold.planner.search.candidates import candidates
from fivefold.planner.search.memory_bounds import least_of_ends
from fivefold.planner.time.parts import Costs

ASKED = ("8b@8", "8b@64", "70b@64", "70b@256", "mixtral@64", "gpt3@1024")
WITHIN = 1.3
ALLOWED = 1.005
TOGETHER = 4096
"""How many are played at once."""

Bounds = npt.NDArray[np.float64]


def near(goal: Goal, cluster: Cluster, longest: float) -> Iterator[tuple[Setup, Bounds]]:
    """The candidates whose bounds are below a time, with these; what is sure not to fit is left out."""
    room = counted_on(cluster) * GIB
    for setup in candidates(goal):
        setup = taken(setup, np.broadcast_to(least_of_ends(setup, cluster) <= room, np.size(setup.pp)))
        if np.size(setup.pp):
            costs = Costs.of(setup, cluster)
            bounds = np.broadcast_to(least_with_messages(costs, Timed.of(costs)), np.size(setup.pp))
            if (mask := bounds < longest).any():
                yield taken(setup, mask), bounds[mask]


def some_of(found: list[tuple[Setup, Bounds]], most: int) -> list[Setup]:
    """All of them; or `most` with the least bounds, and `most` of the others."""
    every = np.concatenate([bounds for _, bounds in found])
    if len(every) <= 2 * most:
        return [setup for setup, _ in found]
    chosen = np.zeros(len(every), dtype=bool)
    order = np.argsort(every)
    chosen[order[:most]] = True
    chosen[np.random.default_rng(0).choice(order[most:], most, replace=False)] = True
    parts = np.split(chosen, np.cumsum([len(bounds) for _, bounds in found])[:-1])
    return [taken(setup, mask) for (setup, _), mask in zip(found, parts, strict=True) if mask.any()]


def fastest(setups: list[Setup], cluster: Cluster) -> tuple[float, int]:
    """Seconds of the fastest that fits, and how many fit."""
    shortest, count = float("inf"), 0
    waiting: list[Setup] = []
    for number, setup in enumerate(setups):
        small = np.broadcast_to(fits(memory(setup, cluster), cluster), np.size(setup.pp))
        if small.any():
            waiting.append(taken(setup, small))
        if sum(np.size(one.pp) for one in waiting) >= TOGETHER or number == len(setups) - 1:
            times = np.concatenate([*step_times([Costs.of(one, cluster) for one in waiting]), [np.inf]])
            shortest, count = min(shortest, float(times.min())), count + len(times) - 1
            waiting = []
    return shortest, count


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("requests", nargs="*", default=ASKED)
    options.add_argument("--most", type=int, default=30_000)
    asked: Any = options.parse_args()
    worst = 0.0
    print("request", "candidates near", "played", "fit", "plan", "brute force", "regret", "seconds", sep="\t")
    for name in asked.requests:
        request = REQUESTS[name]
        goal, cluster = request.goal(int(request.gpus)), request.machines
        planned = search(goal, cluster).best[0].step_time
        started = time.process_time()
        found = list(near(goal, cluster, WITHIN * planned))
        setups = some_of(found, asked.most)
        shortest, count = fastest(setups, cluster)
        worst = max(worst, planned / shortest)
        sizes = (sum(np.size(setup.pp) for setup in some) for some in ([s for s, _ in found], setups))
        print(
            *(name, *sizes, count, f"{planned:.5g}", f"{shortest:.5g}", f"{planned / shortest - 1:+.3%}"),
            f"{time.process_time() - started:.0f}",
            sep="\t",
            flush=True,
        )
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
