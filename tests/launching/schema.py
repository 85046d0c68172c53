"""A small part of JSON Schema: what a value must look like, and where it does not.

A schema is a type, a list with the schema of its items, a mapping of keys, or `Optional` around one of these.
In a mapping every key is required but those that are `Optional`, and no other key is allowed; `{str: schema}`
allows any key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Optional:
    schema: Any


def misfits(value: Any, schema: Any, place: str = "") -> list[str]:
    """Where a value does not fit its schema."""
    if isinstance(schema, Optional):
        return misfits(value, schema.schema, place)
    if isinstance(schema, type):
        return [] if type(value) is schema else [f"{place}: {value!r} is no {schema.__name__}"]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{place}: {value!r} is no list"]
        return [
            found
            for number, item in enumerate(value)
            for found in misfits(item, schema[0], f"{place}[{number}]")
        ]
    if not isinstance(value, dict):
        return [f"{place}: {value!r} is no mapping"]
    if str in schema:
        return [
            found for key, item in value.items() for found in misfits(item, schema[str], f"{place}.{key}")
        ]
    found = [f"{place}.{key}: is not known" for key in value if key not in schema]
    for key, inner in schema.items():
        if key in value:
            found += misfits(value[key], inner, f"{place}.{key}")
        elif not isinstance(inner, Optional):
            found.append(f"{place}.{key}: is missing")
    return found
