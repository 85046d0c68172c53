"""Any schedule by its name, played; its order may have to be searched for."""

from __future__ import annotations

from fivefold.planner.play.timeline import Durations, Timeline, play
from fivefold.planner.play.zero_bubble import search
from fivefold.problems import Problem
from fivefold.schedules import Schedule, schedule_named


def played(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, durations: Durations
) -> Timeline:
    """One step of a schedule. `durations` are those of its stages, `ranks` x `virtual_stages` of them."""
    row = schedule_named(schedule)
    if row.memory_limit is not None:
        return play(search(row.memory_limit, ranks, micro_batches, durations), durations)
    orders = [row.computed(rank, ranks, micro_batches, virtual_stages) for rank in range(ranks)]
    return play(orders, durations)


ROUNDS = 8
"""After so many micro-batches a rank, each further round of one a rank takes as long as the one before."""


def makespan(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, durations: Durations
) -> float:
    """How long a step takes from its first start to its last end.

    Of very many micro-batches only the first rounds are played, and one more, which stands for the rest: to
    within a few thousandths where stages are uneven, exactly where they are not.
    """
    row, few = schedule_named(schedule), ROUNDS * ranks + micro_batches % ranks
    counts = (few, few + ranks)
    if micro_batches <= 2 * few or row.order is None or not all(row.allows(ranks, n) for n in counts):
        return played(schedule, ranks, micro_batches, virtual_stages, durations).makespan
    first, second = (played(schedule, ranks, n, virtual_stages, durations).makespan for n in counts)
    return first + (micro_batches - few) / ranks * (second - first)


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
