"""A job as TOML, such that reading it back gives the same job."""

from __future__ import annotations

import json
from typing import Any

from fivefold.config.schema import Job


def dump_toml(job: Job) -> str:
    """Every key that has a value, section by section. What is None is left out: it is None by default."""
    sections = job.model_dump(by_alias=True, exclude_none=True)
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in section.items())
        for name, section in sections.items()
        if section
    )


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)
