"""A rule: what a layout must keep, as a condition and in words.

The condition takes a `Setup` of one layout or of many: jobs are refused and searches limited by the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.ledger.setup import Setup
from fivefold.problems import Problem

Possible = npt.NDArray[np.bool_] | bool
Says = Callable[[Setup], tuple[str, str]]


@dataclass(frozen=True)
class Rule:
    """What a layout must keep.

    key    the key of the job that is to blame
    holds  the condition; it must not fail where other rules are broken. What all layouts of a setup share may
           be joined by `or`, numbers by `|`
    says   message and hint for the user, of one layout that breaks the rule
    """

    key: str
    holds: Callable[[Setup], Any]
    says: Says

    def allows(self, setup: Setup, **changes: int) -> bool:
        """Whether one layout, with other numbers in it, keeps the rule."""
        return bool(self.holds(replace(setup, **changes)))  # type: ignore[arg-type]


def rule(key: str, holds: Callable[[Setup], Any]) -> Callable[[Says], Rule]:
    """Makes a rule of the function that says what is wrong when it is broken."""
    return lambda says: Rule(key, holds, says)


def problems(rules: Iterable[Rule], setup: Setup) -> list[Problem]:
    """What one layout breaks, in the order of the rules."""
    return [Problem(rule.key, *rule.says(setup)) for rule in rules if not rule.holds(setup)]


def possible(rules: Iterable[Rule], setup: Setup) -> Possible:
    """Whether all rules hold; for each layout where the setup stands for many."""
    numbers = [value for value in vars(setup).values() if isinstance(value, int | np.ndarray)]
    hold = np.ones(np.broadcast_shapes(*map(np.shape, numbers)), dtype=bool)
    for rule in rules:
        hold &= rule.holds(setup)
    return hold if hold.shape else bool(hold)
