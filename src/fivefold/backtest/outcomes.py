"""The planner against published runs: how wrong its step times and memory are, and what its choices cost.

Every figure is given twice: with the constants that ship, which were fitted on these very runs, and with
constants fitted without the run's (publication, model) group. The second is the honest one for a run of a
model or from a source that was never fitted.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean

from fivefold.backtest.memory_fit import Prediction, held_out, predict
from fivefold.backtest.published import PublishedRun
from fivefold.backtest.time_fit import left_out, predicted_times

LEAST_LAYOUTS = 10
"""Layouts that a cell needs for choosing among them to mean anything."""
REGRET_GPUS = 128

DGXC = "NVIDIA dgxc, H100, 16 bits"
DENSE = "other dense A100 and H100, 16 bits"
ZERO_BUBBLE = "Zero Bubble tables"
PLAYBOOK = "HF playbook, pp = 1, tp <= 8, <= 128 GPUs"
PROMISES = (DGXC, DENSE, ZERO_BUBBLE, PLAYBOOK)
"""Groups of runs for which an error was promised."""

Errors = tuple[float, float]
"""Relative to what was measured, with the constants that ship and with honest ones; positive: too much."""


@dataclass(frozen=True)
class Outcome:
    """A run, and what was predicted of it; `honest`: by constants that have not seen its group."""

    run: PublishedRun
    seconds: float
    honest_seconds: float
    memory: Prediction
    honest_memory: Prediction

    @property
    def time_errors(self) -> Errors | None:
        return self._errors(self.run.step_time, self.seconds, self.honest_seconds)

    @property
    def memory_errors(self) -> Errors | None:
        return self._errors(self.run.memory_gib, self.memory.gib, self.honest_memory.gib)

    def _errors(self, measured: float | None, shipped: float, honest: float) -> Errors | None:
        """None where nothing was measured."""
        if measured is None or not self.run.ok:
            return None
        return shipped / measured - 1, honest / measured - 1


@dataclass(frozen=True)
class Line:
    """Some runs together: mean absolute error, mean error, and the mean absolute error that is honest."""

    name: str
    rows: int
    error: float
    bias: float
    honest: float


@dataclass(frozen=True)
class OutOfMemory:
    """How well running out of memory is predicted. `None` where no run was predicted to, or none did."""

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
            gib, fits = f"{outcome.memory.gib:.4g}", str(outcome.memory.fits).lower()
            writer.writerow([outcome.run.row, f"{outcome.seconds:.6g}", gib, fits])


def is_playbook(run: PublishedRun) -> bool:
    return run.source.startswith("HF Ultrascale")


def promise_of(run: PublishedRun) -> str | None:
    """Which of the promises is about a run; None where nothing is promised.

    Of the playbook's runs those are judged whose repeats agree well enough.
    """
    in_half = run.dtype in ("bfloat16", "float16")
    if "dgxc" in run.source and run.device.startswith("H100") and in_half:
        return DGXC
    if run.stack == "zero-bubble":
        return ZERO_BUBBLE
    if is_playbook(run):
        return PLAYBOOK if run.repeatable else None
    dense = in_half and run.setup.spec.experts is None and re.match("[AH]100", run.device)
    return DENSE if dense and "MegaScale" not in run.source else None


def judged(outcomes: Sequence[Outcome]) -> list[Line]:
    """The groups of runs for which an error was promised. Dense runs: the mean of their sources' means."""
    lines = []
    for promise in PROMISES:
        about = [outcome for outcome in outcomes if promise_of(outcome.run) == promise]
        parts = by(about, lambda run: run.publication if promise_of(run) == DENSE else "")
        if parts:
            _, rows, *means = zip(*map(astuple, parts), strict=True)
            lines.append(Line(promise, sum(rows), *map(fmean, means)))
    return lines


def by(
    outcomes: Iterable[Outcome],
    key: Callable[[PublishedRun], str],
    errors: Callable[[Outcome], Errors | None] = lambda outcome: outcome.time_errors,
) -> list[Line]:
    """Errors of the measured runs, those of one key together; the largest groups first."""
    groups: dict[str, list[Errors]] = defaultdict(list)
    for outcome in outcomes:
        if (found := errors(outcome)) is not None:
            groups[key(outcome.run)].append(found)
    lines = []
    for name, group in groups.items():
        shipped, honest = zip(*group, strict=True)
        means = fmean(map(abs, shipped)), fmean(shipped), fmean(map(abs, honest))
        lines.append(Line(name, len(group), *means))
    return sorted(lines, key=lambda line: -line.rows)


def layout_kind(run: PublishedRun) -> str:
    """The axes that a run is split along: "dp", "tp pp", ..."""
    return " ".join(axis for axis in ("tp", "pp", "cp", "ep") if getattr(run.setup, axis) > 1) or "dp"


def regrets(outcomes: Iterable[Outcome]) -> list[Cell]:
    """The playbook's cells of enough layouts. Of layouts that are predicted equal the worst is taken."""
    cells: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for outcome in outcomes:
        run = outcome.run
        in_a_cell = "benchmarks_interactive" in run.source and run.gpus <= REGRET_GPUS
        if in_a_cell and run.ok and run.step_time is not None:
            cells[run.model, run.gpus].append((outcome.honest_seconds, run.step_time))
    found = []
    for (model, gpus), times in sorted(cells.items()):
        if len(times) >= LEAST_LAYOUTS:
            limit = min(predicted for predicted, _ in times) * (1 + 1e-6)
            chosen = max(measured for predicted, measured in times if predicted <= limit)
            best = min(measured for _, measured in times)
            found.append(Cell(model, gpus, len(times), 1 - best / chosen))
    return found


def running_out(outcomes: Iterable[Outcome]) -> OutOfMemory:
    """Failures of the playbook's runs, as predicted from memory alone. Some failed for other reasons."""
    playbook = [outcome for outcome in outcomes if is_playbook(outcome.run)]
    predicted = {outcome.run.row for outcome in playbook if not outcome.honest_memory.fits}
    failed = {outcome.run.row for outcome in playbook if not outcome.run.ok}
    right = len(predicted & failed)
    precision, recall = (right / len(rows) if rows else None for rows in (predicted, failed))
    return OutOfMemory(len(playbook), precision, recall)
