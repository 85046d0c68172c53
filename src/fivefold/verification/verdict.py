"""What `verify` found, in words and as JSON."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from fivefold.verification.compare import Difference, by_quantity


@dataclass(frozen=True)
class Part:
    """One comparison: in a precision, on a kind of device, each quantity in the order of causes."""

    precision: str
    device: str
    differences: list[Difference]

    @property
    def ok(self) -> bool:
        return all(each.ok for each in self.differences)

    @property
    def first_wrong(self) -> Difference | None:
        return next((each for each in self.differences if not each.ok), None)

    @property
    def worst_gradient(self) -> Difference:
        return by_quantity(self.differences)["gradient"]

    def as_json(self) -> dict[str, Any]:
        worst = {
            each.quantity: {"worst": each.error, "where": each.where or None, "bound": each.bound}
            for each in by_quantity(self.differences).values()
        }
        return {"ok": self.ok, "device": self.device, "compared": worst}


@dataclass(frozen=True, repr=False)
class Verdict:
    """What `verify` found. `axis` names the guilty axis when something differs, else None.

    loss, grad_norm  of the first step
    steps, rows      optimizer steps that were taken, and sequences in a micro-batch
    parts            the comparison in float64, then the one in the job's precision if it was asked for
    shrunk           sizes of the job that were made smaller: key, (from, to)
    not_exercised    what the verdict says nothing about, a sentence each
    """

    ok: bool
    worst_gradient_error: float
    worst_parameter: str
    parameters: int
    loss: float
    reference_loss: float
    grad_norm: float
    reference_grad_norm: float
    axis: str | None
    layout: str
    steps: int = 0
    rows: int = 0
    parts: list[Part] = field(default_factory=list)
    shrunk: dict[str, tuple[int, int]] = field(default_factory=dict)
    not_exercised: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """By name; NaN and infinity, which JSON lacks, are None."""
        told = asdict(self) | {
            "precision": {part.precision: part.as_json() for part in self.parts},
            "shrunk": {key: {"from": old, "to": new} for key, (old, new) in self.shrunk.items()},
        }
        del told["parts"]
        without: dict[str, Any] = _finite(told)
        return without

    def sentence(self) -> str:
        """The verdict in one line."""
        part = next((part for part in self.parts if not part.ok), None)
        if part is None:
            worst = f"worst {self.worst_gradient_error:.0e}, rounding"
            for lower in self.parts[1:]:
                gradient = lower.worst_gradient
                worst += f"; in {lower.precision} {gradient.error:.1e} of {gradient.bound:.1e} allowed"
            return f"same ({worst}): {self.layout} against one process"
        wrong = part.first_wrong
        losses = ""
        if wrong is not None and wrong.quantity == "gradient":
            losses = f" (loss {wrong.found!r} against {wrong.reference!r})"
        where = "" if part is self.parts[0] else f" in {part.precision}"
        return f"different{where}: {wrong}{losses} under {self.layout}; axis: {self.axis}"

    def lines(self) -> list[str]:
        """The verdict, and what it covers."""
        quantities = dict.fromkeys(each.quantity for part in self.parts for each in part.differences)
        ran = ", ".join(f"{part.precision} on the {_NAMES[part.device]}" for part in self.parts)
        smaller = ", ".join(
            f"{key.partition('.')[2]} {old:,} to {new:,}" for key, (old, new) in self.shrunk.items()
        )
        return [
            self.sentence(),
            f"  compared: {', '.join(quantities)}",
            f"  over {self.steps} steps of {self.rows} rows a micro-batch, in {ran}",
            *([f"  made smaller: {smaller}"] if smaller else []),
            "  not exercised:",
            *(f"    {each}" for each in self.not_exercised),
        ]

    def __repr__(self) -> str:
        return self.sentence()


_NAMES = {"cpu": "CPU", "cuda": "GPU"}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
