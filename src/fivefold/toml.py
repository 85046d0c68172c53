"""Values as TOML: the standard library reads it, but does not write it."""

import json
from collections.abc import Mapping
from typing import Any


def toml_key(key: Any) -> str:
    """A bare key where TOML allows one, else in quotes."""
    text = str(key)
    return text if text.replace("_", "").replace("-", "").isalnum() and text.isascii() else toml_value(text)


def toml_value(value: Any) -> str:
    """One value, tables and lists in one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{toml_key(key)} = {toml_value(entry)}" for key, entry in value.items()) + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return repr(value)
