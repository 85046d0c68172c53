"""Any schedule by its name, played; its order may have to be searched for."""

from fivefold.planner.play.computations import Computations, Durations, computations
from fivefold.planner.play.timeline import Timeline, timeline
from fivefold.planner.play.zero_bubble import search
from fivefold.problems import Problem
from fivefold.schedules import Schedule, schedule_named


def any_computations(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, durations: Durations
) -> Computations:
    """Of one step of a schedule. `durations` are those of its stages, `ranks` x `virtual_stages` of them."""
    limit = schedule_named(schedule).memory_limit
    if limit is None:
        return computations(schedule, ranks, micro_batches, virtual_stages)
    return Computations(search(limit, ranks, micro_batches, durations))


def played(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, durations: Durations
) -> Timeline:
    """One step of a schedule, of ONE layout."""
    found = any_computations(schedule, ranks, micro_batches, virtual_stages, durations)
    return timeline(found, durations)


def problems(schedule: Schedule, ranks: int, micro_batches: int, virtual_stages: int) -> list[Problem]:
    """Why it cannot be so; empty when it can. Keys are the options of `fivefold simulate`."""
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
