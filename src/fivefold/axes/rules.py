"""A rule: what a layout must keep, as a condition and in words. It refuses jobs, and limits searches."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fivefold.ledger.setup import Setup
from fivefold.models.own.spec import OwnSpec

Says = Callable[[Setup], tuple[str, str]]


@dataclass(frozen=True)
class Rule:
    """What a layout must keep.

    key    the key of the job that is to blame
    holds  the condition, of one layout or of many; it must not fail where other rules are broken. What all
           layouts of a setup share may be joined by `or`, numbers by `|`
    says   message and hint for the user, of one layout that breaks the rule
    """

    key: str
    holds: Callable[[Setup], Any]
    says: Says

    def allows(self, setup: Setup, **changes: int | str) -> bool:
        """Whether one layout, with other numbers in it, keeps the rule."""
        return bool(self.holds(replace(setup, **changes)))  # type: ignore[arg-type]


def rule(key: str, holds: Callable[[Setup], Any]) -> Callable[[Says], Rule]:
    """Makes a rule of the function that says what is wrong when it is broken."""
    return lambda says: Rule(key, holds, says)


def not_of_own_models(axis: str, unknown: str) -> Rule:
    """A model of the user's own is not split along an axis, since something of it is not known."""

    @rule(f"layout.{axis}", lambda setup: not isinstance(setup.spec, OwnSpec) or getattr(setup, axis) == 1)
    def own_model(setup: Setup) -> tuple[str, str]:
        message = f"{getattr(setup, axis)} with model.module: how its {unknown} is not known"
        return message, f"Use layout.{axis} = 1 and split with dp_shard, dp_replicate or pp."

    return own_model
