"""What every verb shares: reading a job, printing, and saying what went wrong with which exit code.

Exit codes: 0 done, 1 ran and has bad news, 2 bad input, 128 + N stopped by signal N (130: Ctrl-C). With
`--json` there is one object on stdout, whatever happens; everything for people to read is on stderr.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.problems import BadInput, BadNews, Problem
from fivefold.training.failures import NonFiniteError, RanksFailed
from fivefold.training.stopping import Stopped

if TYPE_CHECKING:
    from fivefold.config import Job

OPTIONS = ("--preset", "--nproc", "--run", "--json", "--help")
SETTINGS = {"ignore_unknown_options": True}  # `--section.key value` is sorted out by the job's reader

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB.toml|RUN|--section.key VALUE",
        help="A job file or a run's folder, and settings that go over it. `fivefold keys` lists them all.",
        show_default=False,
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="--section.key VALUE",
        help="Keys of a job that every layout is to have. `fivefold keys` lists them all.",
        show_default=False,
    ),
]
Preset = Annotated[str | None, typer.Option(help="A built-in model; `fivefold models` lists them.")]
Nproc = Annotated[
    int | None, typer.Option(help="How many ranks. Default: what the layout says, or one per GPU.")
]
RunFolder = Annotated[
    str | None,
    typer.Option(
        "--run",
        help="The run's folder. One with a checkpoint in it is continued. (Under torchrun: --run.folder.)",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def read_job(words: list[str] | None, preset: str | None, *more: str) -> Job:
    """The job that a command line describes; `more` are options of this verb alone. Raises `BadInput`."""
    from fivefold.config import load, sort_words

    files, settings = sort_words(words or [], (*OPTIONS, *more))
    if len(files) > 1:
        raise BadInput([Problem(files[1], f"is a second job file, after {files[0]}", "Give one.")])
    return load(files[0] if files else None, preset, [f"--{key}={value}" for key, value in settings])


def say_unheeded(job: Job) -> None:
    """Say on stderr what the config of a job's model asks of training, and does not get."""
    for sentence in job.model.unheeded():
        print(sentence, file=sys.stderr)


@contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """Say what went wrong inside the block, and exit with the code for it."""
    told: dict[str, Any]
    try:
        yield
        return
    except typer.Exit:
        raise
    except BadInput as error:
        code, text = 2, str(error)
        told = {"error": "bad input", "problems": [asdict(problem) for problem in error.problems]}
    except Stopped as stopped:
        code, told = int(str(stopped.code)), {"error": str(stopped)}
        text = "" if stopped.told else f"{stopped} before training began: there is nothing to save."
    except KeyboardInterrupt:
        code, text, told = 130, "stopped", {"error": "stopped"}
    except (BadNews, RanksFailed, NonFiniteError) as error:
        code, text, told = 1, str(error), {"error": str(error).splitlines()[0]}
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except Exception as error:
        code, text, told = 1, traceback.format_exc(), {"error": f"{type(error).__name__}: {error}"}
    if sys.stderr.isatty():
        print("\033[?25h", file=sys.stderr)  # a progress bar that was cut off leaves the cursor hidden
    if text:
        print(text, file=sys.stderr)
    if as_json:
        print_json(told)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout, as wide as the terminal; whole lines when there is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(*header, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def show_default(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
