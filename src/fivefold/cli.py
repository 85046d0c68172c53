"""The command line: the verbs of `fivefold.commands`, put together."""

from typing import Annotated

import typer

import fivefold
from fivefold.commands.backtest import backtest
from fivefold.commands.bench import bench
from fivefold.commands.checkpoint import checkpoint
from fivefold.commands.common import SETTINGS
from fivefold.commands.doctor import doctor
from fivefold.commands.keys import keys
from fivefold.commands.launch import launch
from fivefold.commands.models import models
from fivefold.commands.plan import plan
from fivefold.commands.probe import probe
from fivefold.commands.scaling import scaling
from fivefold.commands.simulate import simulate
from fivefold.commands.train import train
from fivefold.commands.verify import verify

app = typer.Typer(
    help="Distributed training of transformers.",
    epilog="Start with: fivefold train --preset tiny --nproc 2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich takes longer to import than all the rest
)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(fivefold.__version__)
        raise typer.Exit


app.command(context_settings=SETTINGS)(plan)
app.command(context_settings=SETTINGS)(simulate)
app.command(context_settings=SETTINGS)(train)
app.command(context_settings=SETTINGS)(launch)
app.command(context_settings=SETTINGS)(verify)
app.add_typer(checkpoint, name="checkpoint")
app.command()(doctor)
app.command()(probe)
app.add_typer(bench, name="bench")
app.command()(scaling)
app.command()(backtest)
app.command()(models)
app.command()(keys)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
