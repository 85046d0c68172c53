"""Arithmetic on a `Number`: the same for one layout and for an array of many."""

import math
from functools import cache
from typing import Any

import numpy as np

from fivefold.ledger.setup import Number


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
