"""A pipeline schedule alone, with times that somebody gave, ready to be shown."""

import math
from collections.abc import Mapping
from typing import Any

from fivefold.planner.play.computations import Durations
from fivefold.planner.play.timeline import Timeline, played
from fivefold.problems import BadInput, Problem, refuse
from fivefold.report.shown import Shown
from fivefold.report.table import as_lines
from fivefold.schedules import Schedule, schedule_named

NEEDED = ("--stages", "--micro-batches", "--forward", "--backward-input", "--backward-weight")
TIMES = ("--forward", "--backward-input", "--backward-weight")


def schedule_shown(schedule: str, options: Mapping[str, Any]) -> Shown:
    """Play a schedule with the options of the command line, by their names. Raises `BadInput`."""
    missing = [option for option in NEEDED if options[option] is None]
    if missing:
        hint = "Times are in milliseconds. Or leave --schedule out and give a job."
        raise BadInput([Problem("--schedule", f"needs {', '.join(missing)} too", hint)])
    row = schedule_named(schedule, "--schedule")
    ranks, micro_batches = options["--stages"], options["--micro-batches"]
    virtual_stages = options["--virtual-stages"]
    if virtual_stages is None:
        virtual_stages = row.usual_stages
    refuse(problems(row, ranks, micro_batches, virtual_stages))
    durations = _durations(options, ranks, virtual_stages)
    timeline = played(schedule, ranks, micro_batches, virtual_stages, durations)
    each = f", {virtual_stages} stages each" if virtual_stages > 1 else ""
    return Shown(
        title=f"{schedule}: {ranks} ranks{each}, {micro_batches} micro-batches",
        rows={f"rank {rank}": row for rank, row in enumerate(timeline.rows)},
        curves={f"rank {rank}": timeline.in_flight(rank) for rank in range(ranks)},
        kept="micro-batches in flight",
        summary=_summary(timeline),
        figures={
            "schedule": schedule,
            "bubble": timeline.bubble,
            "step_time": timeline.step_time,
            "makespan": timeline.makespan,
            "peak_in_flight": timeline.peak_in_flight,
        },
        unit="ms",
    )


def problems(schedule: Schedule, ranks: int, micro_batches: int, virtual_stages: int) -> list[Problem]:
    """Why it cannot be so; empty when it can. Keys are options."""
    given = {"--stages": ranks, "--micro-batches": micro_batches, "--virtual-stages": virtual_stages}
    if min(given.values()) < 1:
        hint = "It must be at least 1."
        return [Problem(option, f"is {value}", hint) for option, value in given.items() if value < 1]
    name = schedule.name
    if schedule.stages not in (None, virtual_stages):
        hint = f"Leave it out: under '{name}' a rank holds {schedule.stages}."
        return [Problem("--virtual-stages", f"{virtual_stages} under '{name}'", hint)]
    if schedule.allows(ranks, micro_batches):
        return []
    needs, nearest = schedule.needed(ranks, micro_batches)
    message = f"{micro_batches}, but '{name}' on {ranks} ranks needs {needs}"
    hint = "Use " + ", or ".join(f"--micro-batches {count}" for count in nearest) + "."
    return [Problem("--micro-batches", message, hint)]


def _summary(timeline: Timeline) -> str:
    peaks = ", ".join(f"{level:.4g}" for level in timeline.peak_in_flight)
    lines = {
        "bubble": f"{timeline.bubble:.2%}",
        "step": f"{timeline.step_time:.6g} ms, the longest that a rank is busy",
        "in flight": f"{peaks} micro-batches at most, rank by rank",
    }
    if timeline.makespan > timeline.step_time * (1 + 1e-9):
        lines["from first to last"] = f"{timeline.makespan:.6g} ms, where the optimizer waits for all ranks"
    return as_lines(lines, width=max(map(len, lines)) + 2)


def _durations(options: Mapping[str, Any], ranks: int, virtual_stages: int) -> Durations:
    stages = ranks * virtual_stages
    found, wrong = [], []
    for option in TIMES:
        try:
            found.append(_times(option, options[option], stages, virtual_stages))
        except BadInput as error:
            wrong += error.problems
    transfer = options["--transfer"] or 0.0
    if not 0 <= transfer < math.inf:
        wrong.append(Problem("--transfer", f"is {transfer}", "It must be 0 or more."))
    refuse(wrong)
    if not any(any(times) for times in found):
        raise BadInput([Problem("--forward", "all times are 0", "Give a time above 0.")])
    forward, backward_input, backward_weight = found
    return Durations(forward, backward_input, backward_weight, transfer)


def _times(option: str, text: str, stages: int, virtual_stages: int) -> tuple[float, ...]:
    """One time of a whole rank, whose stages share it; or one of each stage."""
    try:
        times = [float(word) for word in text.split(",")]
    except ValueError:
        hint = f"Write one number, or {stages} with commas between them."
        raise BadInput([Problem(option, f"'{text}' is not a time in milliseconds", hint)]) from None
    if any(not 0 <= time < math.inf for time in times):
        raise BadInput([Problem(option, f"is {text}", "A time must be 0 or more.")])
    if len(times) == 1:
        return (times[0] / virtual_stages,) * stages
    if len(times) != stages:
        hint = f"Give one, or one for each of the {stages} stages."
        raise BadInput([Problem(option, f"has {len(times)} times", hint)])
    return tuple(times)
