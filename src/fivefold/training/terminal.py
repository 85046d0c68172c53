"""What a person sees of a run, on stderr: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from fivefold.config import Job
    from fivefold.training.run import Summary

PLAIN_EVERY_S = 10.0


class Display:
    """Shows one run. Only rank 0 has one."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._steps = 0
        self._shown_at: float | None = None

    def start(self, job: Job, facts: Mapping[str, object], sizes: Mapping[str, object] | None = None) -> None:
        """Say what is about to be trained. `facts` are shown as they are; `step` is where the run resumes.

        sizes  a second line: how large the model and its data are
        """
        self._steps = job.training.steps
        done = int(str(facts.get("step", 0)))
        told = {"model": job.spec.name, "precision": job.training.precision, **facts}
        if not done:
            told.pop("step", None)
        for line in filter(None, (told, sizes)):
            self._console.print("  ".join(f"{key}: {value}" for key, value in line.items()), markup=False)
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[figures]}", markup=False),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=self._steps, completed=done, figures="")
            self._progress.start()

    def step(self, record: Mapping[str, Any]) -> None:
        """Show the figures of one step (see `training.metrics`)."""
        if self._progress is not None:
            self._progress.update(self._task, completed=record["step"], figures=figures(record))
            if "val_loss" in record:
                self._progress.console.print(self._line(record), markup=False)
            return
        now = time.monotonic()
        waited = self._shown_at is None or now - self._shown_at >= PLAIN_EVERY_S
        if waited or record["step"] == self._steps or "val_loss" in record:
            self._shown_at = now
            self._console.print(self._line(record), markup=False)

    def say(self, text: str) -> None:
        """Tell something that is not a step."""
        console = self._console if self._progress is None else self._progress.console
        console.print(text, markup=False)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Figures in columns; the first one names the row."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for number, cell in enumerate(header):
            table.add_column(cell, justify="right" if number else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        console = self._console if self._progress is None else self._progress.console
        console.print(table)

    def finish(self, summary: Summary) -> None:
        """Say how the run ended."""
        self.close()
        self._console.print(f"{'stopped' if summary.stopped else 'done'}: {summary}", markup=False)
        if summary.stopped:
            self.say(f"It was asked to stop. To go on: fivefold train {quote(summary.folder)}")

    def close(self) -> None:
        """Take the progress bar away, so that an error can be read below it."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _line(self, record: Mapping[str, Any]) -> str:
        left = (self._steps - record["step"]) * record["step_time_s"]
        return f"step {record['step']}/{self._steps}  {figures(record)}  left {duration(left)}"


def figures(record: Mapping[str, Any]) -> str:
    """The figures of a step in one line; MFU only where the device's peak is known."""
    parts = [f"loss {record['loss']:.4f}"]
    if record.get("val_loss") is not None:
        parts.append(f"held-out {record['val_loss']:.4f}")
    parts += [f"grad {record['grad_norm']:.3g}", f"{record['tokens_per_s']:,.0f} tok/s"]
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    parts.append(f"{record['memory_gib']:.2f} GiB")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
