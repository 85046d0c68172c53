"""How far what a layout computed is from what one process computed: quantity by quantity, the worst place."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from fivefold.verification.compute import Computed, Tensors

ROUNDING = 1e-11
"""Differences up to this, relative to the largest gradient of a parameter, are rounding in float64."""

SMALL = 1e-3
"""A parameter's gradient is measured against at least this fraction of the largest gradient of all."""


@dataclass(frozen=True)
class Difference:
    """One quantity, of one step or of what is left after all of them, at its worst place.

    where             the parameter; empty for a number by itself
    found, reference  that number
    """

    quantity: str
    error: float
    bound: float
    where: str = ""
    step: int | None = None
    found: float | None = None
    reference: float | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # not where it is NaN

    def __str__(self) -> str:
        when = "" if self.step in (None, 1) else f" in step {self.step}"
        if not self.where:
            return f"the {self.quantity} is {self.found!r} against {self.reference!r}{when}"
        return f"the {self.quantity} of {self.where} is off by {self.error:.1e} of its size{when}"


class Measure(Protocol):
    """How tensors are compared, and how far apart they may be."""

    def bound(self, step: int) -> float:
        """The largest relative error in a step, or after it, that is rounding."""
        ...

    def error(self, found: Tensors, reference: Tensors) -> tuple[float, str]:
        """The worst relative error, and of which parameter."""
        ...

    def error_of_moves(
        self, found: Tensors, reference: Tensors, begin: Tensors, roundings: int
    ) -> tuple[float, str]:
        """The same of how far weights moved from where they `begin`, and were rounded so often on the way."""
        ...

    def bound_of_heldout(self, reference: Computed) -> float:
        """As `bound`, of the loss with the weights that are left after all steps."""
        ...


class InFloat64:
    """The worst element of each parameter: rounding is some 1e-15, and a bug is not."""

    def bound(self, step: int) -> float:
        return ROUNDING

    def error(self, found: Tensors, reference: Tensors) -> tuple[float, str]:
        return gradient_error(found, reference)

    def error_of_moves(
        self, found: Tensors, reference: Tensors, begin: Tensors, roundings: int
    ) -> tuple[float, str]:
        return gradient_error(found, reference)

    def bound_of_heldout(self, reference: Computed) -> float:
        return ROUNDING


def gradient_error(found: Tensors, reference: Tensors) -> tuple[float, str]:
    """The worst difference, and where: max|g - g1| / max(max|g1|, SMALL * the largest gradient of all)."""
    if found.keys() != reference.keys():
        missing = sorted(found.keys() ^ reference.keys())
        return math.inf, missing[0]
    largest = max(float(g.abs().max()) for g in reference.values())
    errors = {
        name: float((found[name] - g).abs().max()) / max(float(g.abs().max()), SMALL * largest)
        for name, g in reference.items()
    }
    return worst(errors)


def worst(errors: dict[str, float]) -> tuple[float, str]:
    """The largest error and its name; one that is not a number is larger than all."""
    name = max(errors, key=lambda name: _or_infinite(errors[name]))
    return errors[name], name


def _or_infinite(error: float) -> float:
    return error if math.isfinite(error) else math.inf


def differences(found: Computed, reference: Computed, measure: Measure) -> list[Difference]:
    """Every quantity, causes before what they cause: the first that is not `ok` says most."""
    return list(_differences(found, reference, measure))


def _differences(found: Computed, reference: Computed, measure: Measure) -> Iterator[Difference]:
    bound = 0.0

    def number(quantity: str, mine: float, other: float, step: int | None = None) -> Difference:
        error = 0.0 if mine == other else abs(mine - other) / (abs(other) or math.nan)
        return Difference(quantity, error, bound, "", step, mine, other)

    for step, (mine, other) in enumerate(zip(found.steps, reference.steps, strict=True), 1):
        bound = measure.bound(step)
        error, where = measure.error(mine.gradients, other.gradients)
        yield Difference("gradient", error, bound, where, step, mine.loss, other.loss)
        yield number("gradient norm", mine.grad_norm, other.grad_norm, step)
        yield number("loss", mine.loss, other.loss, step)
        error, where = measure.error(mine.clipped, other.clipped)
        yield Difference("gradient that the optimizer gets", error, bound, where, step)
    begin, steps = reference.begin, len(reference.steps)
    error, where = measure.error_of_moves(found.moved, reference.moved, begin, steps)
    yield Difference("update", error, bound, where)
    if reference.averaged:
        # In each step it is rounded itself, and follows weights that are.
        error, where = measure.error_of_moves(found.averaged, reference.averaged, begin, 2 * steps)
        yield Difference("update of the average", error, bound, where)
    for name, bias in reference.biases.items():
        error = float((found.biases[name] - bias).abs().max()) if name in found.biases else math.inf
        yield Difference("balancing bias", error, 0.0, name)
    bound = measure.bound_of_heldout(reference)
    yield number("held-out loss", found.heldout, reference.heldout)


def by_quantity(found: list[Difference]) -> dict[str, Difference]:
    """Of each quantity the worst: over steps and layers."""
    kept: dict[str, Difference] = {}
    for each in found:
        rivals = (kept.get(each.quantity, each), each)
        kept[each.quantity] = max(rivals, key=lambda rival: _or_infinite(rival.error))
    return kept
