"""Simulation: one step of a job on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from fivefold.api.jobs import checked_job
from fivefold.api.words import python_words
from fivefold.config import Job
from fivefold.problems import refuse, unwritable
from fivefold.report.shown import Shown
from fivefold.report.simulated_job import asked, step_shown
from fivefold.report.timeline import as_text, write_trace

WIDTH = 100
MOST_ROWS = 16


@python_words()
def simulate(job: Job, cluster: str | PathLike[str] | None = None, gpus: int | None = None) -> Simulation:
    """Play one step of a job. Raises `BadInput`, or `BadNews` where `layout.auto` finds no layout.

    cluster  a name or a file; left out, what the job says, else dgx-h100
    gpus     how many devices; left out, what the layout says
    """
    where = None if cluster is None else str(cluster)
    return Simulation(step_shown(asked(checked_job(job), where, gpus)))


@dataclass(frozen=True, repr=False)
class Simulation:
    """A step of a job, played on a cluster. It prints as a timeline with a summary below."""

    shown: Shown

    @property
    def figures(self) -> Mapping[str, Any]:
        """What `fivefold simulate --json` prints; times are in milliseconds there."""
        return self.shown.figures

    @property
    def step_time(self) -> float:
        """Seconds."""
        return float(self.figures["step_time_s"])

    @property
    def bubble(self) -> float:
        """The part of the pipeline's time in which its ranks wait for each other, on average."""
        return float(self.figures["bubble"])

    @property
    def exposed(self) -> dict[str, float]:
        """By axis, the seconds in which only its messages run."""
        return {axis: milliseconds / 1e3 for axis, milliseconds in self.figures["exposed"].items()}

    @property
    def optimizer(self) -> float:
        """Seconds."""
        return float(self.figures["optimizer"]) / 1e3

    @property
    def memory_gib(self) -> float:
        """On the fullest device."""
        return float(self.figures["memory_gib"])

    @property
    def fits(self) -> bool:
        """Whether that can be counted on to fit."""
        return bool(self.figures["fits"])

    @python_words()
    def write_png(self, path: str | PathLike[str]) -> None:
        """Draw the timeline, in the format that the file's ending says. Raises `BadInput`."""
        from fivefold.report.timeline_picture import draw

        refuse(unwritable(str(path), "--path"))
        draw(self.shown, str(path))

    @python_words()
    def write_trace(self, path: str | PathLike[str]) -> None:
        """Write a trace for ui.perfetto.dev. Raises `BadInput`."""
        refuse(unwritable(str(path), "--path"))
        write_trace(self.shown, str(path))

    def __repr__(self) -> str:
        rows = dict(list(self.shown.rows.items())[:MOST_ROWS])
        more = len(self.shown.rows) - len(rows)
        lines = [self.shown.title, as_text(replace(self.shown, rows=rows), WIDTH)]
        return "\n".join([*lines, *([f"... and {more} rows more"] if more else []), self.shown.summary])
