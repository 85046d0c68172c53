"""Whether a job may take up the run that a folder holds.

A run goes on with the same model on the same samples. What else a job says (how long, how fast, split over
how many ranks) may change.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fivefold.config import Job, load
from fivefold.config.run_folder import RESOLVED
from fivefold.problems import Problem
from fivefold.storage.folder import newest_first, saved_steps
from fivefold.storage.manifest import DamagedError, OtherFormatError, read_manifest
from fivefold.training.misfit import other_format

FIXED = (
    "model.module",
    "data.source",
    "data.tokenizer",
    "data.separate_documents",
    "data.text_field",
    "data.heldout",
    "training.global_batch",
    "training.seq_len",
    "training.seed",
    "optimizer.name",
)
"""With another of these, step N + 1 would not follow step N."""


def check_resume(folder: Path, job: Job, data: Mapping[str, str] | None = None) -> list[Problem]:
    """Why `job` cannot take up the run in `folder`; empty when it can, or when nothing was saved there.

    data  by source, a fingerprint of what it holds now
    """
    described = folder / RESOLVED
    if not saved_steps(folder):
        return []
    if problems := _newer(folder):
        return problems
    if not described.exists():
        return []
    before = load(str(described))
    hint = f"Keep it to go on with the run in {folder}, or name another folder with --run."
    problems = [
        Problem(key, f"{_at(job, key)!r}, but this run was started with {_at(before, key)!r}", hint)
        for key in (FIXED if saved_steps(folder)[-1] else _fixed_at_first(job))
        if _at(job, key) != _at(before, key)
    ]
    if before.model.module == job.model.module and before.spec != job.spec:
        changed = [
            name
            for name in type(job.spec).model_fields
            if getattr(before.spec, name) != getattr(job.spec, name)
        ]
        name = next((name for name in changed if name != "name"), None)
        if name is not None:
            was, now = getattr(before.spec, name), getattr(job.spec, name)
            problems.append(Problem(f"model.{name}", f"{now!r}, but this run was started with {was!r}", hint))
    if not problems and data is not None and not job.checkpoint.other_data:
        problems += _other_data(folder, data)
    return problems


def _fixed_at_first(job: Job) -> tuple[str, ...]:
    """As `FIXED`, before the first step: the tokenizer that the weights came with, unless one is given."""
    asked = "tokenizer" in job.data.model_fields_set
    return ("model.module",) if asked else ("model.module", "data.tokenizer")


def _newer(folder: Path) -> list[Problem]:
    """The newest checkpoint, if it is in a format that is not known here."""
    newest = next(newest_first(folder))
    try:
        read_manifest(newest)
    except OtherFormatError as error:
        return [other_format(newest, error)]
    except DamagedError:  # it is passed over, and named, when it is taken up
        pass
    return []


def _other_data(folder: Path, data: Mapping[str, str]) -> list[Problem]:
    """Sources that hold something else than when the run was last saved."""
    with suppress(StopIteration, DamagedError):
        before = read_manifest(next(newest_first(folder))).data
        hint = "Bring the files back, or go on with others: checkpoint.other_data = true."
        return [
            Problem("data.source", f"'{name.partition(' ')[2]}' is not what this run was trained on", hint)
            for name in data
            if before.get(name) not in (None, data[name])
        ]
    return []


def _at(job: Job, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(job, section), name)
