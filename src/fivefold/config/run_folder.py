"""The two job files of a run's folder.

    asked.toml  what was asked for: what the user left open in the layout is open still
    job.toml    what runs: nothing is left open

So a run can go on with another number of ranks: what was left open is derived anew, what was fixed is kept.
"""

import math
import re
import tomllib
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fivefold.config.schema import Job
from fivefold.config.write import dump_toml
from fivefold.problems import BadInput, Problem

ASKED, RESOLVED = "asked.toml", "job.toml"


def named_folder(job: Job, run: str | Path | None = None) -> Path | None:
    """The folder that was named for a run, first of all by `run`; None where it was not."""
    named = run or job.run.folder or (Path("runs") / job.run.name if job.run.name else None)
    return Path(named) if named is not None else None


def new_folder(job: Job) -> Path:
    """A folder for a run that nobody has named: after the model and the time."""
    model = re.sub(r"[^\w.-]+", "-", job.spec.name)
    return Path("runs") / f"{model}-{datetime.now():%Y%m%d-%H%M%S-%f}"


def file_to_go_on(folder: Path) -> Path:
    """The job file to go on with the run in a folder. Raises `BadInput` where there is no run in it."""
    for name in (ASKED, RESOLVED):
        if (folder / name).is_file():
            return folder / name
    message = f"is a folder, but not that of a run: there is no {RESOLVED} in it"
    raise BadInput(
        [Problem(str(folder), message, "Give a job file (TOML), or the folder of a run: runs/NAME.")]
    )


def job_files(asked: Job, resolved: Job) -> dict[str, str]:
    """Both files, by their names.

    asked  as the user gave it. What depends on files that may change or on the kind of device (the model's
           numbers, the precision), and not on the number of ranks, stays as it was resolved.
    """
    precision = {"precision": resolved.training.precision}
    kept = {
        "model": resolved.model,
        "training": asked.training.model_copy(update=precision),
        "run": resolved.run,
    }
    asked = asked.model_copy(update=kept)
    return {ASKED: dump_toml(asked, given=True), RESOLVED: dump_toml(resolved)}


def ranks_before(folder: Path | None, asked: Job) -> int | None:
    """How many ranks the run in a folder last had, if the same layout is asked for now; else None."""
    layout = asked.layout.model_dump(by_alias=True, exclude_none=True, exclude_unset=True)
    return ranks_had(folder) if folder is not None and _layout(folder / ASKED) == layout else None


def ranks_had(folder: Path) -> int | None:
    """How many ranks the run in a folder last had; None where none was started."""
    had = _layout(folder / RESOLVED)
    if had is None:
        return None
    degrees = [had.get(key, 1) for key in ("dp_replicate", "dp_shard", "cp", "tp", "pp")]
    return math.prod(degrees) if all(isinstance(degree, int) for degree in degrees) else None


def _layout(path: Path) -> dict[str, Any] | None:
    """The layout in a job file; None where the file cannot be read: then it is written anew."""
    with suppress(OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        found = tomllib.loads(path.read_text()).get("layout", {})
        return found if isinstance(found, dict) else None
    return None
