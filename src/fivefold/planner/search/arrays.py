"""Records whose fields are arrays over many layouts: taking one layout, or some, out of them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

Record = TypeVar("Record")


def taken(record: Record, which: Any) -> Record:
    """The record of the layouts that an index or a mask names; with a single index its fields are scalars.

    Fields that are one number for all layouts stay as they are.
    """
    changed = {field.name: _taken(getattr(record, field.name), which) for field in fields(record)}  # type: ignore[arg-type]
    return replace(record, **changed)  # type: ignore[type-var]


def _taken(value: Any, which: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim:
        picked = value[which]
        return picked.item() if np.ndim(picked) == 0 else picked
    if isinstance(value, dict):
        return {key: _taken(entry, which) for key, entry in value.items()}
    if isinstance(value, tuple) and not isinstance(value, str):
        return tuple(_taken(entry, which) for entry in value)
    if is_dataclass(value) and not isinstance(value, type):
        return taken(value, which)
    return value
