"""Accelerators: peak rates, memory and bandwidth, as their vendors publish them.

Peak rates are dense, in FLOP/s, by the name of the dtype that goes into a matrix product. Where a vendor
prints the figure with sparsity (in bfloat16 1,979 for the H100, 4,500 for the B200), its half stands here.
`float32` is true float32, not TF32. Memory is in GiB (vendors write GB for it), bandwidth in bytes/s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True)
class Device:
    """One kind of accelerator.

    peak_flops  dtype name -> dense FLOP/s; a dtype without fast hardware is left out
    words       a driver's name for the device holds all of these words
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_gib: float
    memory_bandwidth: float
    words: frozenset[str]
    source: str


def find_device(name: str) -> Device | None:
    """The device behind a name of this table, or of `torch.cuda.get_device_name`; None when unknown.

    A slice of a GPU (MIG) is unknown: its peak is not the whole device's.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    if "mig" in words:
        return None
    matches = [device for device in DEVICES if device.name == name or device.words <= words]
    return max(matches, key=lambda device: (device.name == name, len(device.words)), default=None)


def _device(
    name: str,
    words: str,
    memory_gib: float,
    gb_per_s: float,
    source: str,
    half: float = 0,
    **teraflops: float,
) -> Device:
    """A row of the table; `half` is the rate of both 16-bit types."""
    rates = {"bfloat16": half, "float16": half} if half else {}
    peak = {dtype: rate * TERA for dtype, rate in (rates | teraflops).items()}
    return Device(name, peak, memory_gib, gb_per_s * GIGA, frozenset(words.split()), source)


_K40 = "NVIDIA Tesla K40 datasheet, base clock"
_P100 = "NVIDIA Tesla P100 datasheet"
_V100 = "NVIDIA V100 datasheet"
_A100 = "NVIDIA A100 datasheet"
_H100 = "NVIDIA H100 datasheet"
_H200 = "NVIDIA H200 datasheet"
_B200 = "NVIDIA HGX B200 datasheet, an eighth of the board"
_GB200 = "NVIDIA GB200 NVL72 datasheet, one GPU"
_MI300 = "AMD Instinct MI300X data sheet"
_MI325 = "AMD Instinct MI325X data sheet"

DEVICES: tuple[Device, ...] = (
    _device("K40", "k40", 12, 288, _K40, float32=4.29, float64=1.43),
    _device("K40m", "k40m", 12, 288, _K40, float32=4.29, float64=1.43),
    _device("P100 SXM2", "p100 sxm2", 16, 732, _P100, float16=21.2, float32=10.6, float64=5.3),
    _device("P100 PCIe", "p100 pcie 16gb", 16, 732, _P100, float16=18.7, float32=9.3, float64=4.7),
    _device("V100 SXM2 16GB", "v100 sxm2 16gb", 16, 900, _V100, float16=125, float32=15.7, float64=7.8),
    _device("V100 SXM2 32GB", "v100 sxm2 32gb", 32, 900, _V100, float16=125, float32=15.7, float64=7.8),
    _device("V100 PCIe 16GB", "v100 pcie 16gb", 16, 900, _V100, float16=112, float32=14, float64=7),
    _device("V100 PCIe 32GB", "v100 pcie 32gb", 32, 900, _V100, float16=112, float32=14, float64=7),
    _device("A100 SXM 40GB", "a100 sxm4 40gb", 40, 1555, _A100, half=312, float32=19.5, float64=19.5),
    _device("A100 SXM 80GB", "a100 sxm4 80gb", 80, 2039, _A100, half=312, float32=19.5, float64=19.5),
    _device("A100 PCIe 40GB", "a100 pcie 40gb", 40, 1555, _A100, half=312, float32=19.5, float64=19.5),
    _device("A100 PCIe 80GB", "a100 pcie 80gb", 80, 1935, _A100, half=312, float32=19.5, float64=19.5),
    _device(
        "H100 SXM", "h100 80gb hbm3", 80, 3350, _H100, half=989.4, float8=1979, float32=66.9, float64=66.9
    ),
    _device("H100 PCIe", "h100 pcie", 80, 2000, _H100, half=756, float8=1513, float32=51.2, float64=51.2),
    _device("H100 NVL", "h100 nvl", 94, 3900, _H100, half=835.5, float8=1671, float32=60, float64=60),
    _device("H200", "h200", 141, 4800, _H200, half=989.4, float8=1979, float32=66.9, float64=66.9),
    _device("H200 NVL", "h200 nvl", 141, 4800, _H200, half=835.5, float8=1671, float32=60, float64=60),
    _device("B200", "b200", 180, 8000, _B200, half=2250, float8=4500, float32=75, float64=37),
    _device("GB200", "gb200", 186, 8000, _GB200, half=2500, float8=5000, float32=80, float64=40),
    _device("MI300X", "mi300x", 192, 5300, _MI300, half=1307.4, float8=2614.9, float32=163.4, float64=163.4),
    _device("MI325X", "mi325x", 256, 6000, _MI325, half=1307.4, float8=2614.9, float32=163.4, float64=163.4),
    _device("TPU v5p", "tpu v5p", 95, 2765, "Google Cloud TPU v5p documentation", bfloat16=459),
    _device(
        "Trainium2", "trainium2", 96, 2900, "AWS Neuron documentation", half=667, float8=1299, float32=181
    ),
)
