"""The metrics of a run, one record a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from math import nan
from os import PathLike
from pathlib import Path
from typing import Any, overload

from fivefold.problems import BadInput, Problem, closest, did_you_mean
from fivefold.report.table import as_table
from fivefold.training.metrics import FILE
from fivefold.training.metrics import read_metrics as read_records

FIRST, LAST = 3, 7
"""Of a long run, how many steps are shown from its beginning and from its end."""


@dataclass(frozen=True)
class Metric:
    """One optimizer step. A number that was not finite is NaN; what was not measured is None.

    tokens            trained on so far
    memory_gib        the most so far
    mfu_fp8           of jobs with fp8: the fraction of the device's peak in 8 bits; `mfu` is of that in bf16
    attempt           counts the starts of the run from 1
    expert_imbalance  of models with experts
    loss_scale        in fp16
    skipped           the update was left out: numbers were not finite, or fp16's scale was too large
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    memory_gib: float
    attempt: int
    mfu: float | None = None
    hfu: float | None = None
    mfu_fp8: float | None = None
    val_loss: float | None = None
    expert_imbalance: float | None = None
    loss_scale: float | None = None
    skipped: bool | None = None

    @classmethod
    def of(cls, record: dict[str, Any]) -> Metric:
        """From a line of metrics.jsonl, where what is not finite is null."""
        given: dict[str, Any] = {field.name: record.get(field.name) for field in fields(cls)}
        for field in fields(cls):
            if field.default is MISSING and given[field.name] is None:
                given[field.name] = nan
        return cls(**given)


NAMES = [field.name for field in fields(Metric)]


class Metrics(Sequence[Metric]):
    """The steps of a run, in order. They print as a short table."""

    def __init__(self, steps: Sequence[Metric]):
        self._steps = list(steps)

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, place: int) -> Metric: ...
    @overload
    def __getitem__(self, place: slice) -> Metrics: ...
    def __getitem__(self, place: int | slice) -> Metric | Metrics:
        return Metrics(self._steps[place]) if isinstance(place, slice) else self._steps[place]

    def column(self, name: str) -> list[Any]:
        """One quantity of every step: `column("loss")`. Raises `BadInput`."""
        if name not in NAMES:
            raise BadInput([Problem("column", f"'{name}' is not known", did_you_mean(name, NAMES))])
        return [getattr(step, name) for step in self]

    def __repr__(self) -> str:
        validated = any(step.val_loss is not None for step in self)
        header = ["step", "loss", *["held-out"] * validated, "grad", "lr", "tok/s", "GiB"]
        lines = [_cells(step, validated) for step in self]
        if len(lines) > FIRST + LAST:
            lines[FIRST:-LAST] = [["..."] * len(header)]
        return as_table(header, lines)


def _cells(step: Metric, validated: bool) -> list[str]:
    held_out = "" if step.val_loss is None else f"{step.val_loss:.4f}"
    speed, memory = f"{step.tokens_per_s:,.0f}", f"{step.memory_gib:.2f}"
    losses = [f"{step.loss:.4f}", *[held_out] * validated]
    return [str(step.step), *losses, f"{step.grad_norm:.3g}", f"{step.lr:.2e}", speed, memory]


def read_metrics(run: str | PathLike[str]) -> Metrics:
    """What the run in a folder logged, a step each; for a step seen twice the last line counts.

    Lines that a killed process left half-written are skipped. Raises `BadInput`.
    """
    folder = Path(run)
    if folder.is_file():
        hint = f"Give the run's folder: '{folder.parent}'."
        raise BadInput([Problem("run", f"'{folder}' is a file", hint)])
    if not folder.is_dir():
        beside = [path.name for path in folder.parent.glob("*") if path.is_dir()]
        near = closest(folder.name, beside)
        hint = f"Did you mean '{folder.parent / near}'?" if near else "`train` returns a run's folder."
        raise BadInput([Problem("run", f"there is no folder '{folder}'", hint)])
    if not (folder / FILE).is_file():
        runs = sorted(path.parent.name for path in folder.glob(f"*/{FILE}"))
        hint = f"Did you mean '{folder / runs[-1]}'?" if runs else "A run writes it with its first step."
        raise BadInput([Problem("run", f"'{folder}' has no {FILE}", hint)])
    return Metrics([Metric.of(record) for record in read_records(folder)])
