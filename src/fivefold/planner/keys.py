"""A layout as keys of a job: all of them, or some that are given while the planner chooses the rest."""

from collections.abc import Mapping
from typing import Any

from fivefold.config import Job, Training, job_with, setting_value
from fivefold.config.conditions import AXIS_OF
from fivefold.ledger.setup import Setup
from fivefold.problems import BadInput, Problem, did_you_mean, refuse

DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
KEYS = (*DEGREES, "micro_batch", "virtual_stages", "zero", "schedule", "recompute", "cp_kind")
"""What a planner chooses."""

Given = Mapping[str, Any]
"""Some keys of a layout, with their values."""


def as_sections(setup: Setup) -> dict[str, dict[str, Any]]:
    """The keys of a job that make this layout, by section, with nothing left open.

    How an axis works is told where the axis splits anything.
    """
    degrees = {key: int(getattr(setup, key)) for key in DEGREES}
    kinds = {"sequence_parallel": "tp", **AXIS_OF}
    told = {key: getattr(setup, key) for key, axis in kinds.items() if degrees[axis] > 1}
    training = {"micro_batch": int(setup.micro_batch), "recompute": setup.recompute, "compile": setup.compile}
    training |= {"loss_chunk": setup.loss_chunk} if setup.loss_chunk else {}
    optimizer = {"optimizer": {"offload": True}} if setup.offload else {}
    return {"layout": {**degrees, "zero": setup.zero, **told}, "training": training, **optimizer}


def as_job(setup: Setup, job: Job) -> Job:
    """The job, split as the setup says."""
    keys = as_sections(setup)
    layout = job.layout.model_copy(update=keys["layout"] | {"auto": False})
    training = job.training.model_copy(update=keys["training"])
    return job.model_copy(update={"layout": layout, "training": training})


def in_keys(setup: Setup) -> str:
    """A layout in one line, as `--why` takes it: its ZeRO stage, and what differs from 1."""
    keys = {key: value for section in as_sections(setup).values() for key, value in section.items()}
    told = [key for key in keys if key == "zero" or (key in KEYS and keys[key] not in (1, "none"))]
    return ",".join([*(f"{key}={keys[key]}" for key in told), *["compiled"] * setup.compile])


def in_words(setup: Setup) -> str:
    """A layout in one short line: `dp_shard 64 (zero 3) x tp 8 x pp 4 (1f1b), micro-batch 2`."""
    turns = f" x{setup.virtual_stages}" if setup.virtual_stages > 1 else ""
    settings = {"dp_shard": f"zero {setup.zero}", "cp": setup.cp_kind, "pp": f"{setup.schedule}{turns}"}
    words = [
        f"{axis} {getattr(setup, axis)}" + (f" ({settings[axis]})" if axis in settings else "")
        for axis in ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp")
        if getattr(setup, axis) > 1 or (axis == "dp_shard" and setup.zero)
    ]
    line = f"{' x '.join(words) or 'one device'}, micro-batch {setup.micro_batch}"
    line += "" if setup.recompute == "none" else f", recompute {setup.recompute}"
    line += ", states on the host" if setup.offload else ""
    return line + (", compiled" if setup.compile else "")


def given_in(job: Job) -> Given:
    """What a job says of its layout."""
    some: dict[str, Any] = {"include": set(KEYS), "exclude_unset": True, "exclude_none": True}
    return job.layout.model_dump(**some) | job.training.model_dump(**some)


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
