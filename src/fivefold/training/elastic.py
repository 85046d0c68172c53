"""Going on with another number of ranks than a run had: which layout it gets, and when that is allowed.

What the job leaves open is derived anew and what it fixes is kept, as far as that goes with the new number.
Global batch and sample order never change, so the run goes on with the numbers that it would have had.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fivefold.axes.checks import check
from fivefold.comm.world import DeviceKind
from fivefold.config import Job, LayoutSection
from fivefold.problems import BadInput, BadNews, Problem, refuse
from fivefold.training.preflight import memory_problems
from fivefold.training.promise import planned

if TYPE_CHECKING:
    from fivefold.planner.search.planned import Planned

DATA_DEGREES = ("dp_replicate", "dp_shard")


def planned_for(
    job: Job, ranks: int, kind: DeviceKind, before: int | None, restarted: bool
) -> tuple[Job, Planned | None]:
    """The job resolved for `ranks` ranks, and what the planner promises, as `planned` has it.

    before     how many ranks the run has had
    restarted  it was not the user who started it with this number, but a launcher on what it had left
    """
    if before in (None, ranks):
        return planned(job, ranks, kind)
    if job.resilience.elastic:
        return laid_out_anew(job, ranks, kind)
    if restarted:
        hint = (
            "Set resilience.elastic = true to go on with what is left. To wait for lost hosts instead, "
            "start torchrun with a fixed --nnodes."
        )
        message = f"this run has {before} ranks, but was started again with {ranks}"
        raise BadInput([Problem("resilience.elastic", message, hint)])
    return planned(job, ranks, kind)


def laid_out_anew(job: Job, ranks: int, kind: DeviceKind) -> tuple[Job, Planned | None]:
    """The first way to go on with `ranks` ranks that is possible. Raises `BadInput` where there is none."""
    reasons: list[Problem] = []
    for way in ways(job):
        try:
            found, promise = planned(way, ranks, kind)
            refuse([*check(found), *memory_problems(found, kind)])
            return found, promise
        except BadInput as error:
            reasons += [problem for problem in error.problems if problem not in reasons]
        except BadNews as error:
            reasons.append(Problem("resilience.elastic", str(error)))
    raise BadInput([_no_layout(ranks), *reasons])


def ways(job: Job) -> Iterator[Job]:
    """The job with less and less of its layout fixed: the data degrees open, then all a planner chooses."""
    yield job
    yield job.model_copy(update={"layout": _open(job.layout, DATA_DEGREES)})
    if job.model.module is None:
        from fivefold.planner.keys import KEYS

        layout = _open(job.layout, KEYS).model_copy(update={"auto": True})
        training = {
            k: v for k, v in job.training.model_dump(exclude_unset=True).items() if k != "micro_batch"
        }
        yield job.model_copy(update={"layout": layout, "training": type(job.training)(**training)})


def most_ranks(job: Job, most: int, kind: DeviceKind) -> int:
    """The most ranks, `most` at most, with which the run can go on. Raises `BadInput` where none can."""
    for ranks in range(most, 0, -1):
        try:
            laid_out_anew(job, ranks, kind)
            return ranks
        except BadInput:
            continue
    raise BadInput([_no_layout(most)])


def devices_left(ranks: int, kind: DeviceKind) -> int:
    """How many of the devices of `ranks` ranks are there. Asked in a new process: an old one remembers."""
    if kind == "cpu":
        return ranks
    ask = "import torch; print(torch.cuda.device_count())"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    return min(ranks, int(answer.stdout)) if answer.returncode == 0 else 0


def _open(layout: LayoutSection, keys: tuple[str, ...]) -> LayoutSection:
    given = layout.model_dump(exclude_unset=True)
    return LayoutSection(**{key: value for key, value in given.items() if key not in keys})


def _no_layout(ranks: int) -> Problem:
    hint = "Bring back what was lost, or change training.global_batch in a new run."
    return Problem("resilience.elastic", f"there is no layout of this job for {ranks} ranks", hint)
