"""Any schedule by its name, played: those of the pipeline axis, and those that are searched for."""

from __future__ import annotations

from fivefold.axes.schedules import (
    ONE_STAGE,
    SCHEDULES,
    V_SHAPED,
    allows,
    compute_order,
    fewest_micro_batches,
)
from fivefold.planner.simulate import Durations, Timeline, play
from fivefold.planner.zero_bubble import LIMITS, search
from fivefold.problems import Problem, did_you_mean

KNOWN = (*SCHEDULES, *LIMITS)


def played(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, durations: Durations
) -> Timeline:
    """One step of a schedule. `durations` are those of its stages, `ranks` x `virtual_stages` of them."""
    if schedule in LIMITS:
        return play(search(schedule, ranks, micro_batches, durations), durations)
    orders = [compute_order(schedule, rank, ranks, micro_batches, virtual_stages) for rank in range(ranks)]
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
    few = ROUNDS * ranks + micro_batches % ranks
    counts = (few, few + ranks)
    if micro_batches <= 2 * few or schedule in LIMITS or not all(allows(schedule, ranks, n) for n in counts):
        return played(schedule, ranks, micro_batches, virtual_stages, durations).makespan
    first, second = (played(schedule, ranks, n, virtual_stages, durations).makespan for n in counts)
    return first + (micro_batches - few) / ranks * (second - first)


def usual_virtual_stages(schedule: str) -> int:
    """How many stages a rank holds where nobody says."""
    return 1 if schedule in ONE_STAGE or schedule in LIMITS else 2


def problems(schedule: str, ranks: int, micro_batches: int, virtual_stages: int) -> list[Problem]:
    """Why there is no such schedule; empty when there is. Keys are the options of `fivefold simulate`."""
    if schedule not in KNOWN:
        return [Problem("--schedule", f"'{schedule}' is unknown", did_you_mean(schedule, KNOWN))]
    found = [
        Problem(option, f"is {value}", "It must be at least 1.")
        for option, value in (
            ("--stages", ranks),
            ("--micro-batches", micro_batches),
            ("--virtual-stages", virtual_stages),
        )
        if value < 1
    ]
    if found:
        return found
    fixed = schedule in ONE_STAGE or schedule in LIMITS or schedule in V_SHAPED
    if fixed and virtual_stages != usual_virtual_stages(schedule):
        hint = f"Leave it out: under '{schedule}' a rank holds {usual_virtual_stages(schedule)}."
        return [Problem("--virtual-stages", f"{virtual_stages} under '{schedule}'", hint)]
    if not allows(schedule, ranks, micro_batches):
        nearby = range(1, micro_batches + 2 * ranks + 1)
        possible = [count for count in nearby if allows(schedule, ranks, count)]
        below = [count for count in possible if count < micro_batches][-1:]
        above = [count for count in possible if count > micro_batches][:1]
        message = f"{micro_batches}, but '{schedule}' on {ranks} ranks needs " + (
            f"at least {fewest_micro_batches(schedule, ranks)}"
            if micro_batches < fewest_micro_batches(schedule, ranks)
            else f"a multiple of {micro_batches // ranks}"
        )
        hint = "Use " + ", or ".join(f"--micro-batches {count}" for count in below + above) + "."
        return [Problem("--micro-batches", message, hint)]
    return []
