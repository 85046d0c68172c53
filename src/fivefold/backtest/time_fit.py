"""Step times of published runs: what the model predicts of them, and how its constants are fitted.

Each (device, stack) has at most two constants (`fits` of the stack), found by looking around for the least
mean error. They are fitted once on all rows, and once for every (publication, model) group on the rows
without it: errors under those are the honest ones.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.axes.layout import MESH_ORDER
from fivefold.backtest.published import PublishedRun
from fivefold.backtest.stacks import stack_named, stacks
from fivefold.hardware.devices import find_device
from fivefold.planner.play.step_time import step_times
from fivefold.planner.time.constants import TIME_CONSTANTS, TYPICAL, Constants, constants_of, peak
from fivefold.planner.time.parts import Costs
from fivefold.planner.time.stack import Stack

NUMBERS = (*MESH_ORDER, "ep", "virtual_stages", "micro_batch", "global_batch")
"""In what runs that are predicted together may differ."""
RANGES = {
    "matmul": (0.1, 0.95),
    "launch": (1e-6, 1e-3),
    "network": (0.1, 2.0),
    "experts": (0.1, 1.0),
    "attention": (0.3, 1.5),
}
"""Where each constant is looked for."""
STEP = 1.02
"""Ratio of neighbouring values of a constant."""
STRIDES = (16, 8, 4, 2, 1)
"""How many steps at once are tried, the coarse ones first."""

SMALL = 0.05
"""Errors count squared below about this one and by their size above: outliers do not decide, and a row more
or less does not make the fit jump."""

Lookup = Callable[[PublishedRun], Constants]


def shipped(run: PublishedRun) -> Constants:
    """The constants that come with the package."""
    return constants_of(run.cluster.device, stack_named(run.stack), run.setup.precision.compute)


def left_out(run: PublishedRun) -> Constants:
    """Those that were fitted without the run's (publication, model) group."""
    groups = TIME_CONSTANTS.table("without").get(run.device, {}).get(run.stack, {})
    known = groups.get(group_of(run)) or groups.get("*")
    return Constants(**known) if known else shipped(run)


def group_of(run: PublishedRun) -> str:
    """What is left out together."""
    return f"{run.publication} | {run.model}"


def predicted_times(runs: Sequence[PublishedRun], constants: Lookup = shipped) -> npt.NDArray[np.float64]:
    """Seconds a step of each run; those that differ only in numbers are predicted together."""
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        rest = vars(run.setup) | dict.fromkeys(NUMBERS, 1)
        shape = rest.pop("spec").model_dump_json(exclude={"name"})
        alike[run.stack, run.device, run.network, constants(run), shape, *rest.values()].append(index)
    costs = []
    for indices in alike.values():
        first, setups = runs[indices[0]], [runs[index].setup for index in indices]
        arrays: Any = {name: np.array([getattr(setup, name) for setup in setups]) for name in NUMBERS}
        setup = replace(first.setup, **arrays)
        costs.append(Costs.of(setup, first.cluster, stack_named(first.stack), constants(first)))
    found = np.zeros(len(runs))
    for indices, times in zip(alike.values(), step_times(costs), strict=True):
        found[indices] = times
    return found


def fitting_rows(runs: Iterable[PublishedRun]) -> list[PublishedRun]:
    """The runs that constants are fitted on: of the Ultrascale playbook only those whose repeats agree."""
    timed = (run for run in runs if run.ok and run.step_time is not None)
    return [run for run in timed if run.stack != "nanotron" or run.repeatable]


Stored = dict[str, float]
"""Constants by name, as the file has them."""


def fit(runs: Iterable[PublishedRun]) -> dict[str, Any]:
    """The tables of the file of constants."""
    constants: dict[str, dict[str, Stored]] = defaultdict(dict)
    without: dict[str, dict[str, dict[str, Stored]]] = defaultdict(dict)
    places: dict[tuple[str, str], list[PublishedRun]] = defaultdict(list)
    for run in fitting_rows(runs):
        places[run.device, run.stack].append(run)
    for (device, name), rows in sorted(places.items()):
        table = Fit(rows, stack_named(name))
        best = table.best(np.ones(len(rows), dtype=bool))
        constants[device][name] = _stored(table.constants(best))
        groups = np.array([group_of(run) for run in rows])
        without[device][name] = {
            str(group): _stored(table.constants(table.best(groups != group, best)))
            for group in sorted(set(groups))
            if (groups != group).any()
        }
    for device, fitted in without.items():
        for name in fitted:
            fitted[name] = fitted[name] or {"*": _of_others(constants, device, name)}
    _add_typical(constants)
    return {"constants": constants, "without": without}


def _add_typical(constants: dict[str, dict[str, Stored]]) -> None:
    """What is typical of each device: of the stacks with products in 16 bits on all devices of its peak."""
    halves = {name for name, stack in stacks().items() if stack.dtype is None}
    peaks = {name: peak(device, "bfloat16") for name in constants if (device := find_device(name))}
    for place, mine in peaks.items():
        alike = [name for name, other in peaks.items() if other == mine]
        fits = [fit for name in alike for stack, fit in constants[name].items() if stack in halves]
        if fits:
            constants[place][TYPICAL] = _typical(fits)


def _of_others(constants: dict[str, dict[str, Stored]], device: str, stack: str) -> Stored:
    """What is known of a stack without its only group on a device.

    Its constants on other devices; where there are none, those of other stacks on this one.
    """
    elsewhere = [known[stack] for place, known in constants.items() if place != device and stack in known]
    others = [known for name, known in constants[device].items() if name != stack]
    return _typical(elsewhere or others or [_stored(Constants())])


def _typical(known: Sequence[Stored]) -> Stored:
    return {name: median(entry[name] for entry in known) for name in known[0]}


def _stored(constants: Constants) -> Stored:
    return {name: float(f"{value:.4g}") for name, value in asdict(constants).items()}


Point = tuple[int, ...]
"""Of each constant that is fitted: how many steps above the least it is."""


class Fit:
    """One stack on one device: what is predicted of its rows at each point that was looked at."""

    def __init__(self, rows: Sequence[PublishedRun], stack: Stack):
        self.rows, self.stack = rows, stack
        self.measured = np.array([run.step_time for run in rows], dtype=float)
        self.errors: dict[Point, npt.NDArray[np.float64]] = {}

    def constants(self, point: Point) -> Constants:
        values = zip(self.stack.fits, point, strict=True)
        return Constants(**{name: RANGES[name][0] * STEP**steps for name, steps in values})

    def error(self, rows: npt.NDArray[np.bool_], point: Point) -> float:
        """The mean loss over some of the rows: of errors of the logarithm, squared where they are small."""
        if point not in self.errors:
            known = self.constants(point)
            times = predicted_times(self.rows, lambda _: known)
            self.errors[point] = np.abs(np.log(times / self.measured))
        return float((np.hypot(1, self.errors[point][rows] / SMALL) - 1).mean())

    def best(self, rows: npt.NDArray[np.bool_], start: Point | None = None) -> Point:
        """The point with the least error among its neighbours."""
        error = partial(self.error, rows)
        point = start or min(self._starts(), key=error)
        for stride in STRIDES if start is None else STRIDES[2:]:
            while (nearest := min([point, *self._neighbours(point, stride)], key=error)) != point:
                point = nearest
        return point

    def _neighbours(self, point: Point, stride: int) -> Iterable[Point]:
        for axis, name in enumerate(self.stack.fits):
            for steps in (point[axis] - stride, point[axis] + stride):
                if 0 <= steps <= _steps(name, RANGES[name][1]):
                    yield (*point[:axis], steps, *point[axis + 1 :])

    def _starts(self) -> list[Point]:
        """Where to begin. Whether the host or the device is the slower one makes two valleys."""
        usual = (Constants(launch=launch) for launch in (8e-6, 5e-5, 1.5e-4))
        return [tuple(_steps(name, getattr(known, name)) for name in self.stack.fits) for known in usual]


def _steps(name: str, value: float) -> int:
    return round(math.log(value / RANGES[name][0]) / math.log(STEP))
