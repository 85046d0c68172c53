"""What a job says of outer steps (`docs/local-sgd.md`): defaults, and what does not go with them.

Conditions on the layout stand in `axes/outer.py`; these are about the rest of the job.
"""

from __future__ import annotations

from fivefold.config.complain import shown
from fivefold.config.schema import Communication, Job
from fivefold.problems import Problem, either, nearest_multiples

DEFAULTS: dict[str, float | int] = {
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "fragments": 1,
    "outer_delay": 0,
    "outer_mix": 0.0,
}


def filled(given: Communication) -> Communication:
    """With every open number of outer steps filled in, where there are any."""
    if not given.takes_outer_steps:
        return given
    return given.model_copy(update={k: v for k, v in DEFAULTS.items() if getattr(given, k) is None})


def without(given: Communication) -> Communication:
    """The same without outer steps: gradients are summed over replicas in every step."""
    return given.model_copy(update={**dict.fromkeys(DEFAULTS), "local_steps": 1})


def problems(job: Job) -> list[Problem]:
    """Why a job cannot take outer steps as it says."""
    given = job.communication
    if not given.takes_outer_steps:
        hint = "Set communication.local_steps above 1, or leave it out."
        return [
            Problem(f"communication.{key}", f"{shown(value)} without outer steps", hint)
            for key, nothing in (("outer_momentum", 0), ("fragments", 1), ("outer_mix", 0))
            if (value := getattr(given, key)) not in (None, nothing)
        ]
    found = []
    steps, each = job.training.steps, given.local_steps
    if steps % each:
        fitting = [n for n in _divisors(steps) if n % (given.fragments or 1) == 0] or _divisors(steps)
        near = either([n for n in fitting if n < each][-1:] + [n for n in fitting if n > each][:1])
        message = f"{each} does not divide training.steps = {steps}: the last round would be shorter"
        hint = (
            f"Use communication.local_steps = {near}, or training.steps = {nearest_multiples(steps, each)}."
        )
        found.append(Problem("communication.local_steps", message, hint))
    if job.resilience.non_finite == "rollback":
        message = "'rollback' with outer steps: a replica cannot go back while others go on"
        hint = "Use 'skip', which drops the update of one replica, or 'stop'."
        found.append(Problem("resilience.non_finite", message, hint))
    return found


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
