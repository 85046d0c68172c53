"""What devices reach of their peak rates, as a smooth function of the peak.

Known devices are points of a curve, and a device between two of them is between them in speed. It is the
rate reached that is interpolated, not its part of the peak, and no device is promised more than one with a
higher peak is known to reach: so of two devices that differ in nothing else, the one with the higher peak is
never the slower one.
"""

import math
from collections.abc import Iterable

import numpy as np

from fivefold.hardware.devices import Device


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
    rates = [min(rate for one, rate in reached if one >= place) for place in peaks]
    inside = min(max(peak, peaks[0]), peaks[-1])
    return math.exp(np.interp(math.log(inside), np.log(peaks), np.log(rates))) / inside
