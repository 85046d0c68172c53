"""pydantic's errors, said as problems with keys of the job."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from fivefold.config.keys import Keys
from fivefold.problems import Problem, closest, did_you_mean

MISSING = "is missing"


def problems_in(
    error: ValidationError, model: type[BaseModel], prefix: str = "", also: Iterable[str] = ()
) -> list[Problem]:
    """One problem per wrong key.

    model   what was validated
    prefix  the section it is, when it is not the whole job
    also    names that are known beside the model's own
    """
    keys = Keys(model)
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False, include_context=False):
        problem = _problem(dict(item), keys, prefix, also)
        found.setdefault(problem.key, problem)  # a union complains once for each of its members
    return _missing_together(list(found.values()))


def _missing_together(problems: list[Problem]) -> list[Problem]:
    """The problems with all keys that are missing in one."""
    missing = [problem.key for problem in problems if problem.message == MISSING]
    if len(missing) < 2:
        return problems
    hint = f"So are {', '.join(missing[1:])}. Start from model.preset or model.hf to give only what differs."
    return [
        Problem(missing[0], MISSING, hint),
        *(problem for problem in problems if problem.message != MISSING),
    ]


def _problem(item: dict[str, Any], keys: Keys, prefix: str, also: Iterable[str]) -> Problem:
    path = [prefix] if prefix else []
    node = keys.root
    unknown = None
    for part in item["loc"]:
        known = keys.below(node)
        if part in known:
            path.append(part)
            node = known[part]
        else:
            unknown = str(part)
            break
    key = ".".join(path)
    kind, value = str(item["type"]), item["input"]

    if kind == "extra_forbidden" and unknown is not None:
        thing = "key" if path else "section"
        hint = did_you_mean(unknown, [*keys.below(node), *(also if path == [prefix] else ())])
        return Problem(".".join([*path, unknown]), f"there is no such {thing}", hint)
    if kind == "missing":
        return Problem(key, MISSING, f"Allowed: {keys.allowed(node)}.")
    if kind == "value_error":
        reason = str(item["msg"]).removeprefix("Value error, ")
        return Problem(key, reason if keys.below(node) else f"{shown(value)}: {reason}")
    if kind == "model_type" and keys.below(node):
        return Problem(
            key, f"{shown(value)} is not a section", f"Write [{key}] and its keys on the lines below."
        )
    allowed = f"Allowed: {keys.allowed(node)}."
    if kind == "literal_error":
        choices = keys.allowed(node).removeprefix("one of ").split(", ")
        near = closest(str(value), choices)
        return Problem(
            key, f"{shown(value)} is not known", (f"Did you mean '{near}'? " if near else "") + allowed
        )
    if kind.endswith("_type"):
        return Problem(key, f"{shown(value)} is {_kind(value)}", allowed)
    if kind.startswith(("greater", "less", "finite")):
        return Problem(key, f"{shown(value)} is out of range", allowed)
    return Problem(key, f"{shown(value)}: {item['msg']}", allowed)


def shown(value: object) -> str:
    """A value as a user would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if isinstance(value, str) else str(value)


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    names = {str: "text", int: "an integer", float: "a decimal number", list: "a list", dict: "a table"}
    return names.get(type(value), f"a {type(value).__name__}")
