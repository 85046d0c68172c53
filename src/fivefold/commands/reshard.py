"""`fivefold checkpoint reshard`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.commands.common import AsJson, print_json, reporting
from fivefold.problems import BadInput, BadNews, Problem, refuse

if TYPE_CHECKING:
    from fivefold.config import Job
    from fivefold.storage.manifest import Manifest

GIB = 2**30
ALLOWED = ("layout.", "training.micro_batch")
OPTIONS = ("--nproc", "--step", "--force", "--json", "--help")
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN OUT --layout.KEY VALUE",
        help="The run's folder, the folder to write into, and keys of the layout.",
        show_default=False,
    ),
]


def reshard(
    words: Words = None,
    nproc: Annotated[
        int | None, typer.Option(help="For how many ranks. Default: what the layout says.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="The checkpoint of this step. Default: the newest.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="OUT may hold something: checkpoints in it are removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Arrange a run's checkpoint for another layout, in a run's folder of its own.

    Any checkpoint can be taken up under any layout: `fivefold train RUN --nproc 4` is enough. This writes one
    with a file for each rank of the new layout, of what that rank keeps. What the job left open in its layout
    is derived anew; keys given here go over it. No GPU is needed, and memory for little more than one tensor.

    \b
    Examples:
      fivefold checkpoint reshard runs/first runs/first-tp2 --layout.tp 2 --nproc 4
      fivefold train runs/first-tp2
    """
    with reporting(as_json):
        run, out, asked, ranks = _read(words or [], nproc)
        from fivefold.training.reshard import refuse_out
        from fivefold.training.reshard import reshard as write

        refuse_out(run, out, force)
        source, manifest = _source(run, step)
        try:
            job, written = write(source, manifest, asked, ranks, out)
        except OSError as error:
            problem = f"{error.filename or out}: {error.strerror}"
            raise BadNews(
                f"the checkpoint was not written: {problem} ({manifest.size:,} bytes are needed)"
            ) from None
        from fivefold.axes.layout import described

        if as_json:
            sizes = {"step": written.step, "ranks": ranks, "files": len(written.files), "bytes": written.size}
            print_json({"run": str(run), "out": str(out), **sizes})
            return
        print(
            f"{source.name}: {written.size / GIB:.3f} GiB in {len(written.files)} files, "
            f"for {described(job)}. To go on: fivefold train {out}"
        )


def _read(words: list[str], nproc: int | None) -> tuple[Path, Path, Job, int]:
    """The run, where to write, the job with the new layout, and its ranks. Raises `BadInput`."""
    from fivefold.config import job_with, setting_value, sort_words
    from fivefold.config.resolve import ranks_given
    from fivefold.config.run_folder import ranks_before

    folders, settings = sort_words(words, OPTIONS)
    if len(folders) != 2:
        hint = "Write: fivefold checkpoint reshard RUN OUT --layout.KEY VALUE."
        raise BadInput([Problem("RUN OUT", f"{len(folders)} folders are given, not two", hint)])
    run, out = map(Path, folders)
    hint = "Only the layout changes (and training.micro_batch with it): give the rest to `fivefold train`."
    refuse(
        Problem(f"--{key}", "is not a key of the layout", hint)
        for key, _ in settings
        if not key.startswith(ALLOWED)
    )
    if not run.is_dir():
        raise BadInput([Problem("RUN", f"'{run}' is not a folder", "Give a run's folder: runs/NAME.")])
    if nproc is not None and nproc < 1:
        raise BadInput([Problem("--nproc", f"{nproc} is out of range", "Allowed: an integer, at least 1.")])
    job = job_with({key: setting_value(key, text) for key, text in settings}, path=str(run))
    return run, out, job, nproc or ranks_before(run, job) or ranks_given(job.layout) or 1


def _source(run: Path, step: int | None) -> tuple[Path, Manifest]:
    """The checkpoint to read: the newest that is whole, or the one of a step. Raises `BadInput`."""
    from fivefold.storage.folder import newest_first, verified
    from fivefold.storage.manifest import DamagedError

    problems = []
    for folder in newest_first(run):
        if step in (None, int(folder.name.rpartition("-")[2])):
            try:
                return folder, verified(folder)
            except DamagedError as error:
                problems.append(
                    Problem("RUN", f"{folder} is damaged: {error}", "Use another step: --step N.")
                )
    which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    hint = "`fivefold checkpoint ls` lists those there are."
    raise BadInput(problems or [Problem("--step" if step is not None else "RUN", f"{run} has {which}", hint)])
