"""`fivefold verify`"""

from typing import Annotated, Literal

import typer

from fivefold.commands.common import (
    AsJson,
    Nproc,
    Preset,
    Words,
    print_json,
    read_job,
    reporting,
    say_unheeded,
)


def verify(
    words: Words = None,
    preset: Preset = None,
    nproc: Nproc = None,
    run: Annotated[str | None, typer.Option(help="As for train; nothing is written there.")] = None,
    precision: Annotated[
        Literal["fp64", "job"],
        typer.Option(
            help="fp64: the proof in float64. job: behind it the same in training.precision, compiled if "
            "training.compile is set, on GPUs if there is one for each rank; held to what rounding can do.",
        ),
    ] = "fp64",
    as_json: AsJson = False,
) -> None:
    """Check that a job's layout computes what one process computes.

    Runs two steps of a shrunken copy of the job in float64 both ways, and compares losses, gradients,
    clipping and the update. Says what was not exercised.

    \b
    Examples:
      fivefold verify --preset tiny --nproc 4 --layout.zero 3
      fivefold verify --preset tiny --nproc 2 --training.precision bf16 --precision job
    """
    with reporting(as_json):
        job = read_job(words, preset)
        say_unheeded(job)
        from fivefold.verification import verify as compare

        verdict = compare(job, nproc, precision=precision)
        if as_json:
            print_json(verdict.as_json())
        else:
            print("\n".join(verdict.lines()))
        if not verdict.ok:
            raise typer.Exit(1)
