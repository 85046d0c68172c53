"""What a stack reaches on a device: constants fitted on published runs, between them by the device's peak.

Known devices are points of a curve, and a device between two of them is between them in speed. It is the
rate reached that is interpolated, not its part of the peak, and no device is promised more than one with a
higher peak is known to reach: so of two devices that differ in nothing else, the one with the higher peak is
never the slower one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fivefold.hardware.devices import Device, find_device
from fivefold.ledger.setup import Figure
from fivefold.planner.time.stack import Stack


@dataclass(frozen=True)
class FittedFile:
    """A file of constants that `fivefold backtest --fit` writes: tables by name, and a text about them."""

    path: Path

    def table(self, name: str) -> dict[str, Any]:
        """One of its tables; an empty one where nothing was fitted yet."""
        return dict(self._tables.get(name, {}))

    def write(self, tables: Mapping[str, Any]) -> None:
        """Replace all its tables, and forget what was read before."""
        text = json.dumps({"about": self._tables.get("about", ""), **tables}, indent=1)
        self.path.write_text(text + "\n", encoding="utf-8")
        del vars(self)["_tables"]

    @cached_property
    def _tables(self) -> dict[str, Any]:
        return dict(json.loads(self.path.read_text(encoding="utf-8"))) if self.path.exists() else {}


TIME_CONSTANTS = FittedFile(Path(__file__).parent / "constants.json")
TYPICAL = "typical"
"""In that file: what stacks with products in 16 bits have on devices of a peak, on average."""


@dataclass(frozen=True)
class Constants:
    """What is fitted of a stack on a device (at most two: `Stack.fits`), or taken as usual."""

    matmul: float = 0.7  # fraction of the device's peak that large matrix products reach
    launch: float = 8e-6  # seconds that the host takes to start a kernel; no part is faster than that
    network: float = 1.0  # bandwidth between servers relative to what collectives.py has for their network
    experts: float = 0.8  # rate of the experts' products relative to that of one dense product of their size
    attention: float = 1.0  # rate of fused attention relative to what its kernel's authors publish


def constants_of(device: Device, stack: Stack, dtype: str = "bfloat16") -> Constants:
    """The constants of a stack on a device, whose products take numbers of a dtype.

    Where it was fitted, its own. Elsewhere by the device's peak, between those of the devices where it was
    fitted, or, if nowhere, of those where others were (`TYPICAL`). The host, the network and the attention
    kernel have nothing to do with that peak: of them, what is usual of the stack.
    """
    table = TIME_CONSTANTS.table("constants")
    if stack.name in table.get(device.name, {}):
        return Constants(**table[device.name][stack.name])
    ever = any(stack.name in fitted for fitted in table.values())
    name, fitted_in = (stack.name, stack.dtype or "bfloat16") if ever else (TYPICAL, "bfloat16")
    known = [
        (peak(place, fitted_in), Constants(**fitted[name]))
        for place, fitted in ((find_device(place), fitted) for place, fitted in table.items())
        if place is not None and name in fitted
    ]
    if not known:
        return Constants()
    usual = {key: median(getattr(one, key) for _, one in known) for key in ("launch", "network", "attention")}
    here = peak(device, stack.dtype or dtype)
    matmul = part_at(here, ((at, one.matmul) for at, one in known))
    experts = part_at(here, ((at, one.matmul * one.experts) for at, one in known)) / matmul
    return Constants(matmul=matmul, experts=experts, **usual)


def peak(device: Device, dtype: str) -> float:
    """FLOP/s in a dtype, or in the next wider one that the device is known for."""
    for name in (dtype, *{"float4": ("float8", "bfloat16")}.get(dtype, ("bfloat16",)), "float16", "float32"):
        if name in device.peak_flops:
            rate = device.peak_flops[name]
            return 2 * rate if dtype == "float4" and name == "float8" else rate
    return 1e11


def part_at(peak: float, known: Iterable[tuple[float, float]]) -> float:
    """The part of a peak that is reached, from pairs (peak, part) of known devices; level outside them."""
    reached = [(one, one * part) for one, part in known]
    peaks = sorted({one for one, _ in reached})
    rates = [(place, min(rate for one, rate in reached if one >= place)) for place in peaks]
    inside = min(max(peak, peaks[0]), peaks[-1])
    return float(rate_between(rates, inside)) / inside


def rate_between(known: Sequence[tuple[float, float]], size: Figure) -> Figure:
    """The rate at a size, from pairs (size, rate): linear in the logarithms, and level outside them."""
    sizes, rates = np.log(np.asarray(known, dtype=float).T)
    found: Figure = np.exp(np.interp(np.log(np.maximum(size, 1.0)), sizes, rates))
    return found
