"""`fivefold verify`"""

from typing import Annotated

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
    as_json: AsJson = False,
) -> None:
    """Check that a job's layout computes what one process computes.

    Runs a shrunken copy of the job in float64 both ways, and compares loss and gradients.

    \b
    Example:
      fivefold verify --preset tiny --nproc 4 --layout.zero 3
    """
    with reporting(as_json):
        job = read_job(words, preset)
        say_unheeded(job)
        from fivefold.verification import verify as compare

        verdict = compare(job, nproc)
        if as_json:
            print_json(verdict.as_json())
        else:
            print(verdict.sentence())
        if not verdict.ok:
            raise typer.Exit(1)
