"""Jobs from values."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, TypedDict, Unpack

from fivefold.api.words import python_words
from fivefold.config import Job, job_with
from fivefold.problems import BadInput, Problem

Section = Mapping[str, Any]


class PlannedSections(TypedDict, total=False):
    """The sections of a job that `fivefold.plan` takes as keyword arguments: `layout={"tp": 8}`."""

    training: Section
    optimizer: Section
    layout: Section
    communication: Section


class Sections(PlannedSections, total=False):
    """The sections of a job as keyword arguments: `training={"steps": 20}`."""

    model: Section
    data: Section
    checkpoint: Section
    resilience: Section
    run: Section
    cluster: Section


@python_words()
def job(
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    file: str | PathLike[str] | None = None,
    **sections: Unpack[Sections],
) -> Job:
    """A job from a preset, a file and settings, in rising order of precedence. Raises `BadInput`.

    preset     a built-in model; left out, what the file says, else `tiny`
    overrides  settings by dotted key, `{"training.steps": 20}`, or by section
    file       a job file (TOML), or the folder of a run to go on with
    sections   settings by section, `training={"steps": 20}`: they go last
    """
    return job_with(
        checked_overrides(overrides),
        sections,
        preset=preset,
        path=None if file is None else str(file),
    )


def checked_job(job: Job) -> Job:
    """The job, if it is one. Raises `BadInput`."""
    if isinstance(job, Job):
        return job
    hint = 'Make one: fivefold.job("tiny", training={"steps": 20}), or plan.job() of a plan.'
    raise BadInput([Problem("job", f"a {type(job).__name__} is not a job", hint)])


def checked_overrides(overrides: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The overrides, if they are a mapping. Raises `BadInput`."""
    if overrides is None or isinstance(overrides, Mapping):
        return overrides or {}
    hint = 'Give a mapping, such as {"training.steps": 20}. `load_job` takes words of a command line.'
    raise BadInput([Problem("overrides", f"{overrides!r} is a {type(overrides).__name__}", hint)])
