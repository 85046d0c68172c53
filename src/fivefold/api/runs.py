"""Training and verification."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Literal

from fivefold.api.jobs import checked_job
from fivefold.api.words import python_words
from fivefold.config import Job

if TYPE_CHECKING:
    from torch import nn

    from fivefold.training.run import Summary
    from fivefold.verification import Verdict

    OwnModel = Callable[[], nn.Module]


@python_words()
def train(
    job: Job,
    nproc: int | None = None,
    run: str | PathLike[str] | None = None,
    *,
    model: OwnModel | None = None,
    force: bool = False,
    profile: bool = False,
) -> Summary:
    """Train a job. Raises `BadInput`, or `RanksFailed` when a rank failed.

    nproc  how many ranks; left out, as many as the run had, else what the layout says, else one per GPU,
           else one
    run    the run's folder; left out, what the job says, else a new one in `runs/`. A folder that holds
           a checkpoint is continued.
    model  a model of your own, by its class: short for `model.module` (docs/own-model.md)
    force  start although the job does not fit into memory, by the planner's figure
    profile  record the tenth to twelfth step: where the time went, by kind (docs/profile.md)

    Ranks are processes that import the calling script: guard what it does by `if __name__ == "__main__"`.
    """
    from fivefold.training.launch import train as start

    return start(checked_job(job), nproc, None if run is None else str(run), model, force, profile)


@python_words()
def verify(
    job: Job,
    nproc: int | None = None,
    *,
    model: OwnModel | None = None,
    precision: Literal["fp64", "job"] = "fp64",
) -> Verdict:
    """Compare two steps under a job's layout with one process, in float64. Raises `BadInput`.

    nproc      how many ranks; left out, what the layout says, else one
    model      a model of your own, by its class: short for `model.module`
    precision  "job": behind that, the same in the job's own precision and with its compilation

    Scripts need the same guard as for `train`.
    """
    from fivefold.verification import verify as compare

    return compare(checked_job(job), nproc, model, precision)
