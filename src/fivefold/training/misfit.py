"""Why a checkpoint that is whole cannot be taken up by a job."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.config import Job, dump_toml
from fivefold.problems import Problem
from fivefold.storage.manifest import DamagedError

SHOWN = 3
"""Tensors and keys that are named; of the others it is said how many there are."""
DECISIVE = (
    "optimizer.name",
    "optimizer.ema",
    "optimizer.momentum",
    "optimizer.states",
    "training.precision",
    "training.balance",
)
Tensors = Mapping[str, Any]


def other_format(folder: Path, error: DamagedError) -> Problem:
    """It is not damaged: passing over it would lose what was trained since."""
    hint = "Use that version, or name another folder with --run."
    return Problem("run.folder", f"{folder} cannot be read: {error}", hint)


def other_tensors(folder: Path, stored: Tensors, ours: Tensors, before: str, job: Job) -> list[Problem]:
    """The tensors that a checkpoint has otherwise than a job; empty when there are none.

    stored, ours  shape and dtype by name
    before        the job that was saved with it, as TOML
    """
    names = sorted(stored.keys() | ours.keys(), key=lambda name: (not name.startswith("model."), name))
    different = [name for name in names if stored.get(name) != ours.get(name)]
    if not different:
        return []
    told = [
        f"'{name}' is {stored.get(name, 'absent')} there and {ours.get(name, 'absent')} here"
        for name in different[:SHOWN]
    ]
    more = len(different) - len(told)
    message = f"the checkpoint {folder} does not fit this job: " + "; ".join(told)
    message += f"; and {more:,} more tensors" if more else ""
    keys = list(_other_keys(before, job))
    hint = "Use another run folder (--run), or the model, optimizer and precision of that run."
    if keys:
        hint += f" It was trained with {', '.join(keys[:SHOWN])}."
    return [Problem("run.folder", message, hint)]


def _other_keys(before: str, job: Job) -> Iterator[str]:
    """Keys that decide which tensors there are, where they had another value. Read as plain TOML alone."""
    try:
        then, now = tomllib.loads(before), tomllib.loads(dump_toml(job))
    except tomllib.TOMLDecodeError:
        return
    models = (tree["model"] for tree in (then, now) if isinstance(tree.get("model"), dict))
    named = [f"model.{key}" for key in dict.fromkeys(key for model in models for key in model)]
    for key in (*named, *DECISIVE):
        was, is_now = _at(then, key), _at(now, key)
        if was != is_now:
            yield f"{key} = {was!r}" if was is not None else f"no {key}"


def _at(tree: dict[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    table = tree.get(section)
    return table.get(name) if isinstance(table, dict) else None
