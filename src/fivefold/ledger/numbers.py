"""Arithmetic on a `Number`: the same for one layout and for an array of many.

Thousands of layouts share a few combinations of, say, tp and ep. What cannot be computed on arrays, or takes
long, is computed for each distinct combination, and spread over the layouts that have it.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.ledger.setup import Number

Rows = npt.NDArray[np.int64]
"""[combinations, numbers]"""


def choose(condition: Any, yes: Number, no: Number) -> Number:
    """`yes` where the condition holds, else `no`; for each layout apart where the condition is an array."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def divided_up(number: Number, by: Number) -> Number:
    """The quotient, rounded up."""
    return -(-number // by)


def clipped(number: Number, least: Number, most: Number) -> Number:
    """The number, or the end of the range that it is beyond."""
    return choose(number < least, least, choose(number > most, most, number))


@cache
def divisors(number: int, most: float = math.inf) -> tuple[int, ...]:
    """What divides a positive number, in order, up to `most`."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(n for n in sorted({*small, *(number // n for n in small)}) if n <= most)


def spread(answer: Callable[..., Any], *numbers: Number) -> Any:
    """`answer(*numbers)` of one layout; of many, an array [..., layouts], answered once a combination.

    answer  takes plain integers; gives a number, or numbers nested in sequences, always of one shape
    """
    if not any(isinstance(number, np.ndarray) for number in numbers):
        return answer(*(int(number) for number in numbers))
    return Known(lambda rows: [answer(*row) for row in rows.tolist()])(*numbers)


class Known:
    """As `spread`, for a question that is asked again and again: what was answered is kept.

    answers  rows of combinations [n, numbers] -> their answers [n, ...]
    """

    def __init__(self, answers: Callable[[Rows], Any]):
        self._answers = answers
        self._known: dict[tuple[int, ...], Any] = {}

    def __call__(self, *numbers: Number) -> Any:
        """The answers of all layouts, [..., layouts]; of one layout, whose numbers are plain, [...]."""
        columns = np.broadcast_arrays(*(np.asarray(number, dtype=np.int64) for number in numbers))
        rows = np.stack([column.reshape(-1) for column in columns], axis=-1)
        # `np.unique(axis=0)` of the rows would take ten times as long as that of a number for each.
        code = np.zeros(len(rows), dtype=np.int64)
        for column in rows.T:
            code = code * (int(column.max()) + 1) + column
        _, firsts, where = np.unique(code, return_index=True, return_inverse=True)
        keys = [tuple(row) for row in rows[firsts].tolist()]
        new = [key for key in keys if key not in self._known]
        if new:
            self._known.update(zip(new, np.asarray(self._answers(np.array(new))), strict=True))
        picked = np.array([self._known[key] for key in keys])[where]
        return np.moveaxis(picked, 0, -1).reshape(*picked.shape[1:], *columns[0].shape)
