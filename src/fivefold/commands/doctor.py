"""`fivefold doctor`"""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.commands.common import AsJson, print_json, print_table, reporting


def doctor(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The folder of a run, of this machine or shared with it. Left out: the machine.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what is the matter with a run, or with this machine.

    With RUN: who waits for whom, in one sentence that names rank, step and phase, and which ranks are slow.
    The run may train, hang, or have been killed.

    Without: versions; the devices, with a product on each and a message between each pair compared with the
    median; limits of the system; space on the disk of the current folder.

    Exit code 0 when nothing is wrong, else 1.

    \b
    Examples:
      fivefold doctor runs/tiny
      fivefold doctor
    """
    with reporting(as_json):
        ok = _look_at_machine(as_json) if run is None else _look_at_run(Path(run), as_json)
        if not ok:
            raise typer.Exit(1)


def _look_at_run(run: Path, as_json: bool) -> bool:
    from fivefold.watch.diagnosis import busy_s
    from fivefold.watch.doctor import examine, stacks

    report = examine(run)
    if as_json:
        print_json({"run": str(run), **report.told()})
        return report.diagnosis.ok
    print("\n".join(report.lines))
    for path in stacks(run, report):
        print(f"its stacks: {path}")
    if report.beats:
        rows = [
            [str(beat.rank), f"{beat.host}:{beat.pid}", str(beat.step), beat.doing]
            + ["waits" if beat.waits else beat.where]
            + ["" if seconds is None else f"{seconds:.3g}" for seconds in (beat.step_s, busy_s(beat))]
            for beat in report.beats
        ]
        print()
        print_table(["rank", "process", "step", "phase", "where", "s a step", "of them busy"], rows)
    return report.diagnosis.ok


def _look_at_machine(as_json: bool) -> bool:
    from fivefold.bench.machine import look

    machine = look(Path.cwd())
    if as_json:
        print_json(machine.told())
        return machine.ok
    for title, rows in machine.sections():
        width = max(len(name) for name, _ in rows)
        print("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows), ""]))
    print("\n".join(machine.problems) if machine.problems else "nothing is wrong")
    return machine.ok
