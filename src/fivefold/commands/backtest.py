"""`fivefold backtest`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.commands.common import AsJson, print_json, print_table, reporting
from fivefold.problems import BadInput, Problem, refuse, unwritable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fivefold.backtest.outcomes import Line, Outcome


def backtest(
    runs: Annotated[
        str | None, typer.Option(metavar="FILE.csv", help="Measured runs. Default: the published ones.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="ROWS.csv", help="Write what is predicted of every row here.")
    ] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Fit the stacks' constants anew on the published runs, and keep them."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say how wrong the planner is about runs that others have measured and published.

    Step time, memory, running out of memory, and what it costs to take the layout that is predicted fastest.
    "Honest" errors are with constants that were fitted without the run's own source and model. A file of your
    own needs the columns of the published one (`backtest/records/runs.csv`); blank cells are filled, and rows
    that cannot be read are named and left out.

    \b
    Examples:
      fivefold backtest
      fivefold backtest --runs mine.csv --out predicted.csv
      fivefold backtest --fit
    """
    with reporting(as_json):
        from fivefold.backtest import outcomes as tested
        from fivefold.backtest.published import PUBLISHED_RUNS, read_runs

        if fit and runs is not None:
            hint = "Leave out --runs: the constants that ship are of the published runs."
            raise BadInput([Problem("--fit", f"cannot go with --runs {runs}", hint)])
        refuse(unwritable(out, "--out"))
        rows, problems = read_runs(runs or PUBLISHED_RUNS)
        if not rows:
            raise BadInput([*problems, Problem("--runs", "has no row that can be read")])
        if fit:
            _fit(rows)
        outcomes = tested.backtest(rows)
        if out is not None:
            tested.write_rows(outcomes, out)
        if as_json:
            print_json({**_told(outcomes), "problems": [str(problem) for problem in problems]})
            return
        _print(outcomes)
        for problem in problems:
            print(problem)


def _fit(rows: Sequence[Any]) -> None:
    from fivefold.backtest import memory_fit, time_fit
    from fivefold.backtest.stacks import MEMORY_CONSTANTS
    from fivefold.planner.time.constants import TIME_CONSTANTS

    try:
        TIME_CONSTANTS.write(time_fit.fit(rows))
        MEMORY_CONSTANTS.write(memory_fit.fit(rows))
    except OSError as error:
        told = f"'{error.filename}' cannot be written: {error.strerror}"
        raise BadInput([Problem("--fit", told, "Install the package where you may write.")]) from error


def _tables(outcomes: list[Outcome]) -> dict[str, list[Line]]:
    from fivefold.backtest import outcomes as tested

    return {
        "judged": tested.judged(outcomes),
        "by_source": tested.by(outcomes, lambda run: run.publication),
        "by_stack": tested.by(outcomes, lambda run: run.stack),
        "by_device": tested.by(outcomes, lambda run: run.device),
        "by_layout": tested.by(outcomes, tested.layout_kind),
        "memory": tested.by(outcomes, lambda run: run.publication, lambda each: each.memory_errors),
    }


def _told(outcomes: list[Outcome]) -> dict[str, Any]:
    from dataclasses import asdict

    from fivefold.backtest import outcomes as tested

    lines = {name: [asdict(each) for each in table] for name, table in _tables(outcomes).items()}
    cells = tested.regrets(outcomes)
    return {
        "rows": len(outcomes),
        **lines,
        "regret": [asdict(cell) for cell in cells],
        "mean_regret": sum(cell.regret for cell in cells) / len(cells) if cells else None,
        "out_of_memory": asdict(tested.running_out(outcomes)),
    }


TITLES = {
    "judged": "step time: what was promised",
    "by_source": "step time by source",
    "by_stack": "step time by software stack",
    "by_device": "step time by device",
    "by_layout": "step time by the axes split along",
    "memory": "memory by source",
}


def _print(outcomes: list[Outcome]) -> None:
    from fivefold.backtest import outcomes as tested

    for name, lines in _tables(outcomes).items():
        if lines:
            cells = [(each.name, str(each.rows), *_percents(each)) for each in lines]
            print_table((TITLES[name], "rows", "error", "bias", "honest error"), cells)
            print()
    regrets = tested.regrets(outcomes)
    if regrets:
        lost = [(c.model, str(c.gpus), str(c.layouts), f"{c.regret:.1%}") for c in regrets]
        print_table(("layout regret", "GPUs", "layouts", "lost"), lost)
        print(f"mean {sum(cell.regret for cell in regrets) / len(regrets):.1%}\n")
    memory = tested.running_out(outcomes)
    if memory.precision is not None and memory.recall is not None:
        print(
            f"out of memory, {memory.rows} runs: precision {memory.precision:.2f}, recall {memory.recall:.2f}"
        )


def _percents(line: Line) -> tuple[str, str, str]:
    return f"{line.error:.1%}", f"{line.bias:+.1%}", f"{line.honest:.1%}"
