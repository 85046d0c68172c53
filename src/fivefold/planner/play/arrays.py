"""Records whose fields are arrays over many layouts: taking one layout, or some, out of them."""

from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Record = TypeVar("Record")
PLAIN = (int, float, str)


def table(record: Any, layouts: int) -> npt.NDArray[np.float64]:
    """[layouts, figures] of a named tuple of figures, or of other such tuples."""

    def figures(entry: Any) -> Iterator[Any]:
        if isinstance(entry, tuple):
            for each in entry:
                yield from figures(each)
        else:
            yield np.broadcast_to(entry, layouts)

    return np.stack(list(figures(record)), axis=-1).astype(float)


def from_table(like: Record, rows: npt.NDArray[np.float64]) -> Record:
    """The named tuple that a table is of; `like`: one of its kind."""
    columns = iter(np.ascontiguousarray(rows.T))

    def filled(entry: Any) -> Any:
        return type(entry)(*map(filled, entry)) if isinstance(entry, tuple) else next(columns)

    return filled(like)  # type: ignore[no-any-return]


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
        some = {name: taken(value, which) for name, value in values.items()}
        changed = {name: value for name, value in some.items() if value is not values[name]}
        found = replace(record, **changed) if changed else record
    return found  # type: ignore[no-any-return]
