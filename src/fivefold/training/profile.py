"""`--profile`: which steps are recorded, and what is made of the record: traces, a summary, a table."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fivefold.axes.runtime.mesh import Mesh
from fivefold.hardware.devices import this_cpu
from fivefold.problems import BadInput, Problem
from fivefold.training.promise import FILE as PLANNED
from fivefold.training.recorder import Recorder
from fivefold.version import __version__
from fivefold.watch.profile import FOLDER, SUMMARY, Profile, Promise
from fivefold.watch.profile_shown import header, remarks, rows, rows_in_trace, title
from fivefold.watch.trace import read

if TYPE_CHECKING:
    from fivefold.config import Job
    from fivefold.training.terminal import Display

FIRST, LAST = 10, 12
"""The steps that are recorded, counted from the start of the run or of its continuation."""
BEFORE = 2
"""Steps before the first one that is recorded, at least: one that compiles, one for the profiler."""
NO_KERNELS = (
    "the profiler has seen no kernel, so this is the host's time: another profiler may hold the GPU, or its "
    "counters may be for administrators only."
)
PROBE = "(fivefold probe --out here.toml; cluster.file)"


def profiled_steps(done: int, steps: int) -> range:
    """The numbers of the steps to be recorded by a run that has taken `done` of its `steps`; maybe none.

    The tenth to the twelfth from here. Of a shorter run the last three, or fewer, behind two others.
    """
    last = min(steps - done, LAST)
    first = min(FIRST, max(BEFORE + 1, last - (LAST - FIRST)))
    return range(done + first, done + last + 1)


def profile_problems(done: int, steps: int) -> list[Problem]:
    """Why a run that has taken `done` of its `steps` cannot be profiled."""
    if profiled_steps(done, steps):
        return []
    few = f"{steps - done} of {steps} steps left to take" if done else f"{steps} steps"
    hint = f"Raise training.steps to {done + LAST} (at least {done + BEFORE + 1}), or leave --profile out."
    return [Problem("--profile", f"{few}: too few to record one, behind {BEFORE} that warm up", hint)]


def cleared(run: Path) -> Path:
    """The folder of a run's profile, without what an earlier one has left. Raises `BadInput`."""
    folder = run / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (*folder.glob("rank-*.json*"), *folder.glob(SUMMARY)):
            file.unlink()
    except OSError as error:
        hint = "Make room for it, or leave --profile out."
        message = f"'{folder}' cannot be written: {error.strerror}"
        raise BadInput([Problem("--profile", message, hint)]) from None
    return folder


def write_profile(
    recorder: Recorder, job: Job, mesh: Mesh, rank: int, run: Path, display: Display | None
) -> Path | None:
    """Write this rank's trace; with a display, the summary and the table as well. Returns the summary's path.

    A disk that is full ends no run: it is said, and training goes on.
    """
    folder = run / FOLDER
    trace, summary = folder / f"rank-{rank}.json.gz", folder / SUMMARY
    say = display.say if display is not None else _say
    try:
        with _scratch(folder / f"rank-{rank}.json.part") as raw:
            recorder.write(raw)
            told = json.loads(raw.read_text(encoding="utf-8", errors="replace"))
        promise = promised(job, run, mesh) if display is not None else "it is told of rank 0"
        versions = {"fivefold": __version__, "torch": str(torch.__version__)}
        recorded = read(told)
        if not recorded.steps:
            raise ValueError("torch's profiler has recorded no step")
        found = Profile(recorded, rank, mesh.layout.ranks, _device(mesh), promise, versions)
        told["traceEvents"] += rows_in_trace(found)
        with gzip.open(trace, "wt", compresslevel=4, encoding="utf-8") as file:
            file.write(json.dumps(told))
        if display is None:
            return None
        summary.write_text(json.dumps(found.told() | {"trace": trace.name}, indent=1) + "\n")
    except (OSError, RuntimeError, ValueError, LookupError, ArithmeticError) as error:
        say(f"rank {rank}: no profile was written: {type(error).__name__}: {error}. Training goes on.")
        return None
    if mesh.device.type == "cuda" and recorded.source != "kernels":
        say(NO_KERNELS)
    say(title(found))
    display.table(header(found), rows(found))
    for line in (*remarks(found), f"trace, for ui.perfetto.dev: {trace}", f"all figures: {summary}"):
        say(line)
    return summary


def promised(job: Job, run: Path, mesh: Mesh) -> Promise | str:
    """What the planner says of this rank's step, or why it says nothing.

    On the cluster that the job names; else on the built-in one that is made of such devices. For a CPU there
    is none, unless the layout was chosen by it.
    """
    if job.model.module is not None:
        return "the planner knows no models of one's own"
    named, kind = job.cluster.file or job.cluster.preset, "cpu" if mesh.device.type == "cpu" else "cuda"
    if named is None and kind == "cpu" and not (run / PLANNED).exists():
        return f"no cluster is named {PROBE}"
    from fivefold.ledger.setup import Setup
    from fivefold.planner.auto import cluster_of
    from fivefold.planner.play.by_kind import by_kind
    from fivefold.planner.time.parts import Costs

    device = torch.cuda.get_device_name(mesh.device) if kind == "cuda" else "cpu"
    try:
        cluster = cluster_of(job, "cuda" if kind == "cuda" else "cpu", device)
    except BadInput as error:
        return f"{error.problems[0].message} {PROBE}"
    kinds = by_kind(Costs.of(Setup.of(job), cluster), mesh.place.pp).kinds
    of = f"rank {mesh.place.pp} of the pipeline" if mesh.layout.pp > 1 else "a rank"
    rates = "as measured" if cluster.measured else "by data sheets"
    return Promise(f"{of} on {cluster.name}, {rates}", kinds)


def _device(mesh: Mesh) -> str:
    return torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else this_cpu().name


def _say(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """A file that is gone behind the block."""
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
