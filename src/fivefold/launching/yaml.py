"""Values as YAML, in blocks: mappings, lists, text, numbers and truth values."""

import json
import re
from collections.abc import Mapping
from typing import Any

PLAIN = re.compile(r"[A-Za-z/$][\w./@$+-]*(?:[:=][\w./@$+-]+)*")
"""Text that needs no quotes: it begins like no number, and no character in it means anything to YAML."""
OTHER_THAN_TEXT = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def yaml_text(value: Mapping[str, Any]) -> str:
    """A document; text of several lines stands as such."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    """The lines of a mapping or of a list, both not empty."""
    entries = value.items() if isinstance(value, Mapping) else ((None, item) for item in value)
    found = []
    for key, entry in entries:
        mark = "-" if key is None else f"{_scalar(key)}:"
        if isinstance(entry, Mapping | list) and entry:
            inner = _lines(entry)
            if key is None:
                found += [f"- {inner[0]}", *(f"  {line}" for line in inner[1:])]
            else:
                found += [mark, *(f"  {line}" for line in inner)]
        elif isinstance(entry, str) and "\n" in entry:
            found += [f"{mark} |", *(f"  {line}" if line else "" for line in entry.splitlines())]
        else:
            found.append(f"{mark} {_scalar(entry)}")
    return found


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in OTHER_THAN_TEXT:
        return value
    return json.dumps(value, ensure_ascii=False)
