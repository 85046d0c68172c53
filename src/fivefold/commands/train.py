"""`fivefold train`"""

from dataclasses import asdict
from typing import Annotated

import typer

from fivefold.commands.common import AsJson, Nproc, Preset, RunFolder, Words, print_json, read_job, reporting


def train(
    words: Words = None,
    preset: Preset = None,
    nproc: Nproc = None,
    run: RunFolder = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start although the job does not fit into memory.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Record steps 10 to 12 of this start: where the time goes, by kind."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model.

    Starts its own ranks, one per GPU or --nproc on a CPU; inside torchrun or srun it joins theirs. A job that
    cannot fit into this machine's memory, by the planner's figure, is refused with what would help (exit code
    2); --force tries all the same. A loss or gradient that is not finite ends the run, or
    --resilience.non_finite skip leaves that update out, or rollback goes back to the last checkpoint first.
    --profile tells where the time of three steps went (products, attention, norms, optimizer, messages,
    idle), each kind beside what the planner promised, and leaves traces for ui.perfetto.dev in RUN/profile.

    \b
    Examples:
      fivefold train --preset tiny --nproc 4
      fivefold train job.toml --training.steps 500 --optimizer.lr 6e-4
      fivefold train --preset tiny --nproc 4 --layout.zero 2 --data.source "books/*.txt"
      fivefold train job.toml --resilience.non_finite skip
      fivefold train job.toml --training.steps 20 --profile
      torchrun --nproc-per-node 8 -m fivefold train job.toml

    A run's folder in place of a job file goes on with that run, on as many ranks as it had; with --nproc, on
    another number: what its job left open in the layout is derived anew, what it fixed is kept, or refused.

    \b
      fivefold train runs/first
      fivefold train runs/first --nproc 4 --training.steps 500
    """
    with reporting(as_json):
        job = read_job(words, preset, "--force", "--profile")
        from fivefold.comm.world import launched_world
        from fivefold.training.launch import train as start

        summary = start(job, nproc, run, force=force, profile=profile)
        world = launched_world()
        if as_json and (world is None or world.rank == 0):
            print_json(asdict(summary))
