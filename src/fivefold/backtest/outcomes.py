"""The planner against published runs: how wrong its step times and memory are, and what its choices cost.

Every figure is given twice: with the constants that ship, which were fitted on these very runs, and with
constants fitted without the run's (publication, model) group. The second is the honest one for a run of a
model or from a source that nobody has fitted.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fivefold.backtest.memory_fit import Prediction, held_out, predict
from fivefold.backtest.published import PublishedRun
from fivefold.backtest.time_fit import left_out, predicted_times

HALF = ("bfloat16", "float16")
MANY = 10
"""Layouts that a cell needs for choosing among them to mean anything."""
REGRET_GPUS = 128


@dataclass(frozen=True)
class Outcome:
    """A run, and what was predicted of it; `honest`: by constants that have not seen its group."""

    run: PublishedRun
    seconds: float
    honest_seconds: float
    memory: Prediction
    honest_memory: Prediction

    @property
    def timed(self) -> bool:
        return self.run.ok and self.run.step_time is not None

    @property
    def error(self) -> float:
        """Of the step time, relative to the measured one; positive: predicted too long."""
        return self.seconds / (self.run.step_time or self.seconds) - 1

    @property
    def honest_error(self) -> float:
        return self.honest_seconds / (self.run.step_time or self.honest_seconds) - 1


@dataclass(frozen=True)
class Line:
    """Some runs together: mean absolute error, mean error, and the mean absolute error that is honest."""

    name: str
    rows: int
    error: float
    bias: float
    honest: float


@dataclass(frozen=True)
class Running:
    """Out of memory, as predicted and as it came. `None` where nothing was predicted, or nothing came."""

    rows: int
    precision: float | None
    recall: float | None


@dataclass(frozen=True)
class Cell:
    """One model on one number of GPUs: what choosing the layout that is predicted fastest costs."""

    model: str
    gpus: int
    layouts: int
    regret: float


def backtest(runs: Sequence[PublishedRun]) -> list[Outcome]:
    """What is predicted of every run."""
    seconds, honest = predicted_times(runs), predicted_times(runs, left_out)
    kept = held_out(runs)
    return [
        Outcome(run, float(one), float(other), predict(run), kept[run.row])
        for run, one, other in zip(runs, seconds, honest, strict=True)
    ]


def write_rows(outcomes: Iterable[Outcome], path: str | Path) -> None:
    """One line a run: what is predicted of it."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "predicted_step_time_s", "predicted_memory_gib", "predicted_fits"])
        for outcome in outcomes:
            memory = outcome.memory
            fits = str(memory.fits).lower()
            writer.writerow([outcome.run.row, f"{outcome.seconds:.6g}", f"{memory.gib:.4g}", fits])


# --- step time -----------------------------------------------------------------------------------------


def is_dgxc(run: PublishedRun) -> bool:
    """NVIDIA's own benchmark runs on H100s in 16 bits."""
    return "dgxc" in run.source and run.device.startswith("H100") and run.dtype in HALF


def is_zero_bubble(run: PublishedRun) -> bool:
    return run.stack == "zero-bubble"


def is_playbook(run: PublishedRun) -> bool:
    return run.source.startswith("HF Ultrascale")


def is_plain_playbook(run: PublishedRun) -> bool:
    """Those of the playbook whose repeats agree well enough to be judged by."""
    return is_playbook(run) and bool(run.setup.pp == 1 and run.setup.tp <= 8) and run.gpus <= 128


def is_dense(run: PublishedRun) -> bool:
    """The other dense runs on A100s and H100s in 16 bits."""
    apart = is_dgxc(run) or is_zero_bubble(run) or is_playbook(run) or "MegaScale" in run.source
    return not apart and not run.moe and run.dtype in HALF and bool(re.match("[AH]100", run.device))


def judged(outcomes: Iterable[Outcome]) -> list[Line]:
    """The groups of runs for which an error was promised. Dense runs: the mean of their sources' means."""
    timed = [outcome for outcome in outcomes if outcome.timed]
    dense = by([outcome for outcome in timed if is_dense(outcome.run)], lambda run: run.publication)
    lines = [
        line("NVIDIA dgxc, H100, 16 bits", [o for o in timed if is_dgxc(o.run)]),
        Line(
            "other dense A100 and H100, 16 bits",
            sum(each.rows for each in dense),
            _mean(each.error for each in dense),
            _mean(each.bias for each in dense),
            _mean(each.honest for each in dense),
        ),
        line("Zero Bubble tables", [o for o in timed if is_zero_bubble(o.run)]),
        line("HF playbook, pp = 1, tp <= 8, <= 128 GPUs", [o for o in timed if is_plain_playbook(o.run)]),
    ]
    return [each for each in lines if each.rows]


def by(outcomes: Iterable[Outcome], key: Callable[[PublishedRun], str]) -> list[Line]:
    """Errors of the timed runs, those of one key together; the largest groups first."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.timed:
            groups[key(outcome.run)].append(outcome)
    return sorted((line(name, group) for name, group in groups.items()), key=lambda each: -each.rows)


def line(name: str, outcomes: Sequence[Outcome]) -> Line:
    """Some timed runs together."""
    return Line(
        name,
        len(outcomes),
        _mean(abs(outcome.error) for outcome in outcomes),
        _mean(outcome.error for outcome in outcomes),
        _mean(abs(outcome.honest_error) for outcome in outcomes),
    )


def layout_kind(run: PublishedRun) -> str:
    """The axes that a run is split along: "dp", "tp pp", ..."""
    setup = run.setup
    degrees = {"tp": setup.tp, "pp": setup.pp, "cp": setup.cp, "ep": setup.ep}
    return " ".join(axis for axis, degree in degrees.items() if degree > 1) or "dp"


# --- choosing ------------------------------------------------------------------------------------------


def regrets(outcomes: Iterable[Outcome], most_gpus: int = REGRET_GPUS, honest: bool = True) -> list[Cell]:
    """The playbook's cells of enough layouts. Of layouts that are predicted equal the worst is taken."""
    cells: dict[tuple[str, int], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        run = outcome.run
        if outcome.timed and "benchmarks_interactive" in run.source and run.gpus <= most_gpus:
            cells[run.model, run.gpus].append(outcome)
    found = []
    for (model, gpus), group in sorted(cells.items()):
        if len(group) < MANY:
            continue
        times = [outcome.honest_seconds if honest else outcome.seconds for outcome in group]
        measured = [outcome.run.step_time or 0.0 for outcome in group]
        chosen = max(
            took for took, time in zip(measured, times, strict=True) if time <= min(times) * (1 + 1e-6)
        )
        found.append(Cell(model, gpus, len(group), 1 - min(measured) / chosen))
    return found


# --- memory --------------------------------------------------------------------------------------------


def memory_lines(outcomes: Iterable[Outcome]) -> list[Line]:
    """Errors of memory by publication."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for outcome in outcomes:
        run = outcome.run
        if run.ok and run.memory_gib is not None:
            pair = outcome.memory.gib / run.memory_gib - 1, outcome.honest_memory.gib / run.memory_gib - 1
            groups[run.publication].append(pair)
    lines = [
        Line(
            name,
            len(pairs),
            _mean(abs(one) for one, _ in pairs),
            _mean(one for one, _ in pairs),
            _mean(abs(other) for _, other in pairs),
        )
        for name, pairs in groups.items()
    ]
    return sorted(lines, key=lambda each: -each.rows)


def running_out(outcomes: Iterable[Outcome], honest: bool = True) -> Running:
    """Failures of the playbook's runs, as predicted from memory alone. Some failed for other reasons."""
    pairs = [
        (not (outcome.honest_memory if honest else outcome.memory).fits, not outcome.run.ok)
        for outcome in outcomes
        if is_playbook(outcome.run)
    ]
    both = sum(said and came for said, came in pairs)
    said, came = sum(said for said, _ in pairs), sum(came for _, came in pairs)
    return Running(len(pairs), both / said if said else None, both / came if came else None)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
