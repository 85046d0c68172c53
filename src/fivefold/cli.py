"""The command line: one function a verb, a few lines each.

Exit codes: 0 done, 1 ran and has bad news, 2 bad input, 130 stopped by Ctrl-C. With `--json` there is one
object on stdout, whatever happens; everything for people to read is on stderr.

torch takes seconds to import, so every verb imports what it needs.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fivefold
from fivefold.problems import BadInput, Problem, did_you_mean
from fivefold.training.failures import NonFiniteError, RanksFailed

if TYPE_CHECKING:
    from fivefold.config import Job

OPTIONS = ("--preset", "--nproc", "--run", "--json", "--help")
SETTINGS = {"ignore_unknown_options": True}  # `--section.key value` is sorted out by the job's reader

app = typer.Typer(
    help="Distributed training of transformers.",
    epilog="Start with: fivefold train --preset tiny --nproc 2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich takes longer to import than all the rest
)

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB.toml|--section.key VALUE",
        help="A job file, and settings that go over it. `fivefold keys` lists them all.",
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


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(fivefold.__version__)
        raise typer.Exit


@app.command(context_settings=SETTINGS)
def train(
    words: Words = None,
    preset: Preset = None,
    nproc: Nproc = None,
    run: RunFolder = None,
    as_json: AsJson = False,
) -> None:
    """Train a model.

    Starts its own ranks, one per GPU or --nproc on a CPU; inside torchrun or srun it joins theirs.

    \b
    Examples:
      fivefold train --preset tiny --nproc 4
      fivefold train job.toml --training.steps 500 --optimizer.lr 6e-4
      fivefold train --preset tiny --nproc 4 --layout.zero 2 --data.source "books/*.txt"
      torchrun --nproc-per-node 8 -m fivefold train job.toml
    """
    with reporting(as_json):
        job = read_job(words, preset)
        from fivefold.comm.world import launched_world
        from fivefold.training.launch import train as start

        summary = start(job, nproc, run)
        world = launched_world()
        if as_json and (world is None or world.rank == 0):
            print_json(asdict(summary))


@app.command(context_settings=SETTINGS)
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
        from fivefold.verification import verify as compare

        verdict = compare(job, nproc)
        if as_json:
            print_json(verdict.as_json())
        else:
            print(verdict.sentence())
        if not verdict.ok:
            raise typer.Exit(1)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the built-in models, with exact parameter counts."""
    from fivefold.models.inventory import parameter_count
    from fivefold.models.presets import PRESETS

    counts = {name: parameter_count(spec) for name, spec in PRESETS.items()}
    if as_json:
        print_json({name: {**PRESETS[name].model_dump(), "parameters": counts[name]} for name in PRESETS})
        return
    rows = [
        (
            name,
            f"{count:,}",
            f"{spec.layers}",
            f"{spec.dim:,}",
            f"{spec.heads}/{spec.kv_heads}",
            f"{spec.vocab_size:,}",
        )
        for (name, spec), count in zip(PRESETS.items(), counts.values(), strict=True)
    ]
    print_table(("model", "parameters", "layers", "width", "heads/kv", "vocabulary"), rows)


@app.command()
def keys(
    section: Annotated[str | None, typer.Argument(help="Only this section.")] = None, as_json: AsJson = False
) -> None:
    """List the settings of a job, with what each allows and means."""
    from fivefold.config import Job, list_keys

    with reporting(as_json):
        found = [key for key in list_keys() if section is None or key.name.startswith(f"{section}.")]
        if not found:
            hint = did_you_mean(section or "", Job.model_fields)
            raise BadInput([Problem(section or "", "there is no such section", hint)])
        if as_json:
            print_json({key.name: asdict(key) for key in found})
            return
        rows = [(key.name, show_default(key.default), key.allowed, key.description) for key in found]
        print_table(("key", "default", "allowed", "meaning"), rows)


def read_job(words: list[str] | None, preset: str | None) -> Job:
    """The job that a command line describes. Raises `BadInput`."""
    from fivefold.config import load, sort_words

    files, settings = sort_words(words or [], OPTIONS)
    if len(files) > 1:
        raise BadInput([Problem(files[1], f"is a second job file, after {files[0]}", "Give one.")])
    return load(files[0] if files else None, preset, [f"--{key}={value}" for key, value in settings])


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
    except KeyboardInterrupt:
        code, text, told = 130, "stopped", {"error": "stopped"}
    except (RanksFailed, NonFiniteError) as error:
        code, text, told = 1, str(error), {"error": str(error).splitlines()[0]}
    except Exception as error:
        code, text, told = 1, traceback.format_exc(), {"error": f"{type(error).__name__}: {error}"}
    if sys.stderr.isatty():
        print("\033[?25h", file=sys.stderr)  # a progress bar that was cut off leaves the cursor hidden
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


def main() -> None:
    app()


if __name__ == "__main__":
    main()
