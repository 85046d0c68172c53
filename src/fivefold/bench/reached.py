"""How near one device comes to its peak: FLOP/s of one computation, fresh and sustained.

A GPU at its limit of power lowers its clock after some 40 ms of large products, and a CPU leaves its highest
clock. What a device reaches after a rest is what is printed of it; what it sustains is what training sees.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from fivefold.bench.timing import WINDOW, Call, seconds_of
from fivefold.comm.world import DeviceKind
from fivefold.hardware.devices import find_device, this_cpu

Bench = Literal["matmul", "mlp"]

ROUNDS = 5
REST = {"cuda": 0.5, "cpu": 0.1}
"""Seconds without work before each fresh window."""
SECONDS = {"cuda": 2.0, "cpu": 0.5}
"""How long a sustained measurement lasts, and as long before it, where the user does not say."""


class Dtype(NamedTuple):
    """What goes into a product.

    peak     its name in the table of devices
    float32  how torch multiplies float32 ("high": rounded to TF32), as `set_float32_matmul_precision` has it
    """

    torch: torch.dtype
    peak: str
    float32: str = "highest"


DTYPES = {
    "bf16": Dtype(torch.bfloat16, "bfloat16"),
    "fp16": Dtype(torch.float16, "float16"),
    "tf32": Dtype(torch.float32, "tf32", "high"),
    "fp32": Dtype(torch.float32, "float32"),
}
"""By their names on the command line."""


class Reached(NamedTuple):
    """FLOP/s: the median of some windows after a rest each; and in seconds of nothing else, after as many."""

    fresh: float
    sustained: float


@dataclass(frozen=True)
class Point:
    """What one dtype reached at one size: the side of square matrices, or the rows that go into a network."""

    dtype: str
    size: int
    reached: Reached


@dataclass(frozen=True)
class Sweep:
    """One device, measured.

    seconds  of each sustained measurement
    peaks    dense FLOP/s by dtype, of those that the table of devices has
    shape    of a network: its `width` and `layers`
    """

    bench: Bench
    device: str
    torch: str
    seconds: float
    peaks: Mapping[str, float]
    points: tuple[Point, ...]
    shape: Mapping[str, int] = field(default_factory=dict)

    def shares(self, point: Point) -> Reached | None:
        """Of the peak: HFU of a product, MFU of a network; None where no peak is known."""
        peak = self.peaks.get(point.dtype)
        return Reached(*(rate / peak for rate in point.reached)) if peak else None


def reached(call: Call, flops: float, device: torch.device, seconds: float) -> Reached:
    """FLOP/s of calls of so many."""
    call()
    once = min(seconds_of(call, device, 1) for _ in range(2))
    fresh = statistics.median(_after_a_rest(call, device, _calls_in(WINDOW, once)) for _ in range(ROUNDS))
    calls = _calls_in(seconds, fresh)
    seconds_of(call, device, calls)
    return Reached(flops / fresh, flops / seconds_of(call, device, calls))


def _calls_in(seconds: float, once: float) -> int:
    return max(1, round(seconds / max(once, 1e-7)))


def _after_a_rest(call: Call, device: torch.device, calls: int) -> float:
    time.sleep(REST[device.type])
    return seconds_of(call, device, calls)


@contextmanager
def multiplying(dtype: Dtype) -> Iterator[None]:
    """Inside the block torch multiplies float32 as this dtype wants it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(dtype.float32)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def name_and_peaks(kind: DeviceKind, dtypes: Iterable[str]) -> tuple[str, dict[str, float]]:
    """The device here, and what the table of devices knows of its dense FLOP/s in these dtypes."""
    if kind == "cpu":
        return this_cpu().name, {}
    driver = torch.cuda.get_device_name()
    known = find_device(driver)
    if known is None:
        return driver, {}
    rates = known.peak_flops
    return known.name, {name: rates[DTYPES[name].peak] for name in dtypes if DTYPES[name].peak in rates}
