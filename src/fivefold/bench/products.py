"""`fivefold bench matmul`: FLOP/s of square matrix products, by dtype and size."""

import torch

from fivefold.bench.asked import Asked
from fivefold.bench.reached import DTYPES, Point, Reached, Sweep, multiplying, name_and_peaks, reached
from fivefold.comm.world import DeviceKind, device_of

USUAL: dict[DeviceKind, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "cuda": (tuple(DTYPES), tuple(2**power for power in range(9, 16))),  # 512 to 32,768
    "cpu": (("fp32", "bf16"), (512, 1024, 2048)),
}
"""Dtypes and sizes. A CPU would take minutes for the larger ones."""


def needs(dtype: str, size: int) -> float:
    """Bytes of two matrices [size, size] and their product."""
    return 3.0 * size**2 * DTYPES[dtype].torch.itemsize


def measure(asked: Asked) -> Sweep:
    """Every dtype and size, one after the other."""
    device = device_of(0, asked.device)
    name, peaks = name_and_peaks(asked.device, asked.dtypes)
    points = tuple(
        Point(dtype, size, _product(dtype, size, device, asked.seconds))
        for dtype in asked.dtypes
        for size in asked.sizes
    )
    return Sweep("matmul", name, torch.__version__, asked.seconds, peaks, points)


def _product(dtype: str, size: int, device: torch.device, seconds: float) -> Reached:
    """Of [size, size] x [size, size], random numbers: zeros would take less power."""
    kind = DTYPES[dtype]
    left, right = (torch.randn(size, size, device=device, dtype=kind.torch) for _ in range(2))
    with multiplying(kind):
        return reached(lambda: left @ right, 2.0 * size**3, device, seconds)
