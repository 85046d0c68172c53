"""The memory model against published runs: what it predicts of a row, and how its constants are fitted.

A row's figure is that of the rank, and of the kind, which its stack publishes (`rank` and `figure` of its
profile). `fit` looks on a grid for the constants of each (device, stack) with the least mean absolute error;
`held_out` does so with every (source, model) group left out in turn, which is the honest figure.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.backtest.described_memory import impossible, memory_of
from fivefold.backtest.published import PublishedRun
from fivefold.backtest.stacks import MemoryProfile, memory_constants, memory_profile, stack_named
from fivefold.ledger.setup import Figure
from fivefold.planner.memory.fullest_rank import GIB, Memory, MemoryConstants, chance_of_running_out
from fivefold.planner.time.stack import Stack

LIKELY = 0.3
"""From this chance of running out on, a run is said not to fit."""

GRID: Mapping[str, npt.NDArray[np.float64]] = {
    "base": np.concatenate([np.arange(0, 1, 0.1), np.arange(1, 9.01, 0.5)]),
    "activations": np.arange(0.6, 1.81, 0.05),
    "gathered": np.arange(0, 1.01, 0.05),
}
"""Where constants are looked for. `slack` is not among them: it is read off what was reserved."""


@dataclass(frozen=True)
class Prediction:
    """Of one run: its source's figure, the chance of running out, and why it cannot run at all, or None."""

    gib: float
    chance: float
    reason: str | None

    @property
    def fits(self) -> bool:
        return self.reason is None and self.chance < LIKELY


def predict(run: PublishedRun, constants: MemoryConstants | None = None) -> Prediction:
    """What the model says of a run; with the constants shipped where none are given."""
    stack = stack_named(run.stack)
    constants = constants or memory_constants(run.device, stack.memory)
    needed = memory_of(run.setup, stack, constants)
    chance = float(chance_of_running_out(needed, run.cluster))
    return Prediction(float(_gib(needed, stack)), chance, impossible(run.setup, stack))


def _gib(needed: Memory, stack: Stack) -> Figure:
    """The figure that is published of a stack's runs."""
    profile = memory_profile(stack.memory)
    found: Figure = getattr(needed.ranks[0] if profile.rank == "first" else needed, profile.figure)
    return found / GIB


def fit(runs: Iterable[PublishedRun]) -> dict[str, Any]:
    """The tables of the file of constants, by profile and device with measured memory."""
    constants: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    spread: dict[str, dict[str, float]] = defaultdict(dict)
    for (profile, device), table in sorted(_tables(runs).items()):
        constants[profile][device] = {name: getattr(table.all, name) for name in table.profile.fits}
        spread[profile][device] = table.all.spread
    return {"constants": constants, "spread": spread}


def held_out(runs: Sequence[PublishedRun]) -> dict[int, Prediction]:
    """By row: what is predicted when nothing of the row's (source, model) group was seen.

    Where a stack has only one group, the rest of it tells nothing, and typical constants are used.
    """
    fitted: dict[tuple[str, ...], MemoryConstants] = {}
    for place, table in _tables(runs).items():
        fitted[place] = table.all
        groups = [(run.source, run.model) for run in table.runs]
        for group in set(groups):
            others = np.array([other != group for other in groups])
            fitted[*place, *group] = table.best(others) if others.any() else MemoryConstants()
    found = {}
    for run in runs:
        place = stack_named(run.stack).memory, run.device
        found[run.row] = predict(run, fitted.get((*place, run.source, run.model)) or fitted.get(place))
    return found


class _Table:
    """What every point of a grid predicts for each of some runs of one profile on one device."""

    def __init__(self, profile: MemoryProfile, runs: list[PublishedRun]):
        self.profile, self.runs = profile, runs
        names = [name for name in profile.fits if name in GRID]
        points = np.array(list(itertools.product(*(GRID[name] for name in names))))
        self.points: dict[str, Any] = dict(zip(names, points.T, strict=True))
        trial = MemoryConstants(**self.points)
        self.measured = np.array([run.memory_gib for run in runs])
        self.predicted = np.empty((len(runs), len(points)))
        for row, run in enumerate(runs):
            stack = stack_named(run.stack)
            self.predicted[row] = _gib(memory_of(run.setup, stack, trial), stack)
        self.all = self.best(np.ones(len(runs), dtype=bool))

    def best(self, which: npt.NDArray[np.bool_]) -> MemoryConstants:
        """The point with the least mean absolute error over some of the runs."""
        errors = np.abs(self.predicted[which] / self.measured[which, None] - 1)
        place = int(errors.mean(axis=0).argmin())
        chosen = {name: round(float(axis[place]), 3) for name, axis in self.points.items()}
        logs = np.log(self.measured[which] / self.predicted[which, place])
        spread = max(0.03, float(np.sqrt((logs**2).mean())))
        if "slack" in self.profile.fits:
            chosen |= self._slack(which)
        return MemoryConstants(**chosen, spread=round(spread, 3))

    def _slack(self, which: npt.NDArray[np.bool_]) -> dict[str, float]:
        """What was reserved, by a row's notes, beyond what was allocated; empty where no row has both."""
        shares = []
        for index in np.flatnonzero(which):
            if reserved := re.search(r"reserved ([\d.]+) GiB", self.runs[index].notes):
                shares.append(float(reserved[1]) / self.measured[index] - 1)
        return {"slack": round(float(np.median(shares)), 3)} if shares else {}


def _tables(runs: Iterable[PublishedRun]) -> dict[tuple[str, str], _Table]:
    grouped: dict[tuple[str, str], list[PublishedRun]] = defaultdict(list)
    for run in runs:
        if run.ok and run.memory_gib is not None and run.setup.spec.experts is None:
            grouped[stack_named(run.stack).memory, run.device].append(run)
    return {key: _Table(memory_profile(key[0]), members) for key, members in grouped.items()}
