"""Records whose fields are arrays over many layouts: taking one layout, or some, out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

Record = TypeVar("Record")
PLAIN = (int, float, str)


def joined(records: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Named tuples of figures of several groups of layouts, `sizes` of them each, as one of them all."""
    if isinstance(records[0], tuple):
        return type(records[0])(*(joined(column, sizes) for column in zip(*records, strict=True)))
    return np.concatenate([np.broadcast_to(one, size) for one, size in zip(records, sizes, strict=True)])


def taken(record: Record, which: Any) -> Record:
    """The record of the layouts that an index or a mask names; with a single index its fields are scalars.

    What is one value for all layouts stays as it is.
    """
    found: Any = record
    if isinstance(record, np.ndarray) and record.ndim:
        picked = record[which]
        found = picked if np.ndim(picked) else picked.item()
    elif isinstance(record, dict):
        found = {key: taken(entry, which) for key, entry in record.items()}
    elif isinstance(record, tuple):
        entries = [taken(entry, which) for entry in record]
        found = type(record)(*entries) if hasattr(record, "_fields") else tuple(entries)
    elif is_dataclass(record) and not isinstance(record, type):
        values = {name: value for name, value in vars(record).items() if not isinstance(value, PLAIN)}
        found = replace(record, **{name: taken(value, which) for name, value in values.items()})
    return found  # type: ignore[no-any-return]
