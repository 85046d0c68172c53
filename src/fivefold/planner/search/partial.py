"""A layout of which only some keys are given: `tp=8,pp=4,zero=3`. The planner chooses the rest."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fivefold.config import Job, Training, job_with, setting_value
from fivefold.hardware.cluster import Cluster
from fivefold.planner.goal import Goal
from fivefold.planner.memory.known_activations import NUMBERS
from fivefold.planner.search.best import SearchResult, search
from fivefold.planner.search.candidates import Choices
from fivefold.problems import BadInput, Problem, did_you_mean, refuse

STRUCTURE = ("zero", "schedule", "recompute", "cp_kind")
KEYS = (*NUMBERS, *STRUCTURE)

Given = Mapping[str, Any]
"""Some keys of a layout, with their values."""


def read_given(text: str, option: str) -> Given:
    """`tp=8,schedule=1f1b` as a mapping; a key may have its section before it. Raises `BadInput`."""
    given: dict[str, Any] = {}
    problems = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = word.partition("=")
        key = key.strip().removeprefix("layout.").removeprefix("training.").removeprefix("--")
        if not equals:
            problems.append(Problem(option, f"'{word}' has no value", "Write KEY=VALUE, such as tp=8,pp=4."))
        elif key in given:
            problems.append(Problem(option, f"'{key}' is given twice", "Give it once."))
        else:
            given[key] = setting_value(setting(key), value.strip())
    refuse([*problems, *given_problems(given, option)])
    return given


def given_in(job: Job) -> Given:
    """What a job says of its layout."""
    return {
        key: getattr(section, key)
        for section in (job.layout, job.training)
        for key in section.model_fields_set.intersection(KEYS)
        if getattr(section, key) is not None
    }


def given_problems(given: Given, option: str) -> list[Problem]:
    """Keys that no layout has; without such, values that a job would not take either, in its own words."""
    problems = [_unknown(key, option) for key in given if key not in KEYS]
    for key, value in given.items() if not problems else ():
        try:
            job_with({setting(key): value})
        except BadInput as error:
            problems += [Problem(option, f"{key}: {p.message}", p.hint) for p in error.problems]
    return problems


def _unknown(key: str, option: str) -> Problem:
    if key == "dp":
        hint = "Say dp_shard=N (the ranks of ZeRO), dp_replicate=N (copies), or both."
        return Problem(option, "'dp' is two keys here", hint)
    return Problem(option, f"'{key}' is not a key of a layout", did_you_mean(key, KEYS))


def setting(key: str) -> str:
    """A layout's key as a job has it, with its section."""
    return f"{'training' if key in Training.model_fields else 'layout'}.{key}"


def best_with(given: Given, goal: Goal, cluster: Cluster, best: int = 1) -> SearchResult:
    """The best layouts that have the given keys."""
    chosen = {field.name: (given[field.name],) for field in fields(Choices) if field.name in given}
    return search(goal, cluster, Choices(**chosen, given=given), best)
