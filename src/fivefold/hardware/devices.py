"""Accelerators: peak rates, memory, bandwidth and cores, as their vendors publish them.

Peak rates are dense, in FLOP/s, by the name of the dtype that goes into a matrix product. Where a vendor
prints the figure with sparsity (in bfloat16 1,979 for the H100, 4,500 for the B200), its half stands here.
`float32` is true float32; `tf32` is float32 that tensor cores round to 19 bits before they multiply. Memory
is in GiB (vendors write GB for it), bandwidth in bytes/s.

Texts on training print some of these figures otherwise. "H100 1,979 TFLOP/s" and "B200 5,000" are with
sparsity, and "P100 22" is its 21.2 rounded up.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from fivefold.hardware.links import NVLINK_C2C, PCIE_3, PCIE_4, PCIE_5, Link
from fivefold.threads import cores

DeviceKind = Literal["cpu", "cuda"]
TERA = 1e12
GIGA = 1e9
GIBI = 2**30


@dataclass(frozen=True)
class Device:
    """One kind of accelerator.

    peak_flops        dtype name -> dense FLOP/s (float4: NVFP4); a dtype without fast hardware is left out
    memory_bandwidth  bytes/s; 0 where it is not known (a CPU before it is probed)
    words             a driver's name for the device holds all of these words
    sms               streaming multiprocessors (AMD: compute units)
    fp32_cores        lanes that do one float32 multiply-add a cycle
    tensor_cores      matrix units (AMD: matrix cores; TPU: matrix multiply units)
    l2_mib            the last cache that all of them share (AMD: the dies' L2 together)
    host_bandwidth    bytes/s each way between its memory and the host's, by the link's maker
    is_host           it is the host's own processor: starting operations and sending messages take its time

    The four numbers of units, and `host_bandwidth`, are None where no source was found; units are 0 where the
    device has none.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_gib: float
    memory_bandwidth: float
    words: frozenset[str]
    source: str
    sms: int | None = None
    fp32_cores: int | None = None
    tensor_cores: int | None = None
    l2_mib: float | None = None
    host_bandwidth: float | None = None
    is_host: bool = False

    @property
    def kind(self) -> DeviceKind:
        """Torch's name for it."""
        return "cpu" if self.is_host else "cuda"


@cache
def find_device(name: str) -> Device | None:
    """The device behind a name of this table, or of `torch.cuda.get_device_name`; None when unknown.

    A slice of a GPU (MIG) is unknown: its peak is not the whole device's.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    if "mig" in words:
        return None
    matches = [device for device in DEVICES if device.name == name or device.words <= words]
    return max(matches, key=lambda device: (device.name == name, len(device.words)), default=None)


def this_cpu(ranks: int = 1) -> Device:
    """One rank's share of this machine's processor and memory when `ranks` of them run on it.

    Its rates are unknown until `fivefold probe` has measured them.
    """
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    share = "" if ranks == 1 else f", one of {ranks} ranks"
    return Device(
        name=f"CPU {_processor_name()} ({cores()} cores{share})",
        peak_flops={},
        memory_gib=page * pages / GIBI / ranks,
        memory_bandwidth=0.0,
        words=frozenset({"this", "cpu"}),
        source="the operating system of this machine",
        sms=max(1, cores() // ranks),
        tensor_cores=0,
        is_host=True,
    )


def _processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else "unknown"


@dataclass(frozen=True)
class _Chip:
    """Units of a kind of chip, and its link to a host, that all its boards share."""

    sms: int | None = None
    fp32_cores: int | None = None
    tensor_cores: int | None = None
    l2_mib: float | None = None
    to_host: Link | None = None
    is_host: bool = False


def _device(
    name: str,
    words: str,
    memory_gib: float,
    gb_per_s: float,
    source: str,
    chip: _Chip,
    half: float = 0,
    **teraflops: float,
) -> Device:
    """A row of the table; `half` is the rate of both 16-bit types."""
    rates = {"bfloat16": half, "float16": half} if half else {}
    peak = {dtype: rate * TERA for dtype, rate in (rates | teraflops).items()}
    host = None if chip.to_host is None else chip.to_host.bandwidth
    units = (chip.sms, chip.fp32_cores, chip.tensor_cores, chip.l2_mib, host, chip.is_host)
    return Device(name, peak, memory_gib, gb_per_s * GIGA, frozenset(words.split()), source, *units)


# Units by NVIDIA's architecture whitepapers (Kepler GK110, Pascal, Volta, Ampere, Hopper). Those of Blackwell
# are what the driver tells of a device (of the B200: pytorch/ao#4002; a GPU of the GB200 has 152 SMs). Those
# who tune kernels for a B300 or a GB300 see the same two numbers.
# The link to a host is by the boards' datasheets: of the B300 that of its hosts, whose PCIe is 5.0.
_GK110 = _Chip(15, 2880, 0, 1.5, PCIE_3)
_GP100 = _Chip(56, 3584, 0, 4, PCIE_3)
_GV100 = _Chip(80, 5120, 640, 6, PCIE_3)
_GA100 = _Chip(108, 6912, 432, 40, PCIE_4)
_GH100 = _Chip(132, 16896, 528, 50, PCIE_5)
_GH100_PCIE = _Chip(114, 14592, 456, 50, PCIE_5)
_GB100 = _Chip(148, 18944, 592, 126, PCIE_5)
_GB100_GRACE = _Chip(152, 19456, 608, 126, NVLINK_C2C)
_CDNA3 = _Chip(304, 19456, 1216, 32, PCIE_5)  # AMD CDNA 3 white paper; 256 MB of Infinity Cache behind the L2
_CDNA4 = _Chip(256, 16384, 1024, 32, PCIE_5)  # AMD CDNA 4 white paper; 256 MB of Infinity Cache behind the L2
_UNKNOWN = _Chip()
_TPU = _Chip(tensor_cores=8)  # two TensorCores of four matrix multiply units each, v4 and v5p alike
_CORE = _Chip(1, 16, 0, is_host=True)

_K40 = "NVIDIA Tesla K40 datasheet, base clock"
_P100 = "NVIDIA Tesla P100 datasheet"
_V100 = "NVIDIA V100 datasheet"
_A100 = "NVIDIA A100 datasheet"
_A800 = "NVIDIA A800 datasheet: an A100 with 400 GB/s of NVLink"
_H100 = "NVIDIA H100 datasheet"
_H100_96 = "NVIDIA H100 datasheet; memory as torchtitan's benchmark pages describe theirs (HBM2e, 500 W)"
_H800 = "NVIDIA H800 data as published by server vendors: an H100 with 400 GB/s of NVLink"
_H200 = "NVIDIA H200 datasheet"
_B200 = "NVIDIA HGX B200 datasheet, an eighth of the board"
_GB200 = "NVIDIA GB200 NVL72 datasheet, one GPU"
_B300 = "NVIDIA HGX B300 datasheet, an eighth of the board (2.1 TB in all)"
_GB300 = "NVIDIA GB300 NVL72 datasheet, one GPU (20 TB in all)"
_MI300 = "AMD Instinct MI300X data sheet"
_MI325 = "AMD Instinct MI325X data sheet"
_MI355 = "AMD Instinct MI355X data sheet"
_TPU_V4 = "Google Cloud TPU v4 documentation"
_TPU_V5P = "Google Cloud TPU v5p documentation"
_TRN2 = "AWS Neuron documentation"
_LAPTOP = "an assumption: 2 fused units of 8 float32 at 3 GHz; an eighth of 16 GiB DDR4-3200 on two channels"

_PASCAL = {"float16": 21.2, "float32": 10.6, "float64": 5.3}
_PASCAL_PCIE = {"float16": 18.7, "float32": 9.3, "float64": 4.7}
_VOLTA = {"float16": 125.0, "float32": 15.7, "float64": 7.8}
_VOLTA_PCIE = {"float16": 112.0, "float32": 14.0, "float64": 7.0}
_AMPERE = {"half": 312.0, "tf32": 156.0, "float32": 19.5, "float64": 19.5}
_HOPPER = {"half": 989.4, "float8": 1979.0, "tf32": 494.7, "float32": 66.9, "float64": 66.9}
_HOPPER_PCIE = {"half": 756.0, "float8": 1513.0, "tf32": 378.0, "float32": 51.2, "float64": 51.2}
_HOPPER_NVL = {"half": 835.5, "float8": 1671.0, "tf32": 417.75, "float32": 60.0, "float64": 60.0}
_MI300_RATES = {"half": 1307.4, "float8": 2614.9, "tf32": 653.7, "float32": 163.4, "float64": 163.4}

DEVICES: tuple[Device, ...] = (
    _device("K40", "k40", 12, 288, _K40, _GK110, float32=4.29, float64=1.43),
    _device("K40m", "k40m", 12, 288, _K40, _GK110, float32=4.29, float64=1.43),
    _device("P100 SXM2", "p100 sxm2", 16, 732, _P100, _GP100, **_PASCAL),
    _device("P100 PCIe", "p100 pcie 16gb", 16, 732, _P100, _GP100, **_PASCAL_PCIE),
    _device("V100 SXM2 16GB", "v100 sxm2 16gb", 16, 900, _V100, _GV100, **_VOLTA),
    _device("V100 SXM2 32GB", "v100 sxm2 32gb", 32, 900, _V100, _GV100, **_VOLTA),
    _device("V100 PCIe 16GB", "v100 pcie 16gb", 16, 900, _V100, _GV100, **_VOLTA_PCIE),
    _device("V100 PCIe 32GB", "v100 pcie 32gb", 32, 900, _V100, _GV100, **_VOLTA_PCIE),
    _device("A100 SXM 40GB", "a100 sxm4 40gb", 40, 1555, _A100, _GA100, **_AMPERE),
    _device("A100 SXM 80GB", "a100 sxm4 80gb", 80, 2039, _A100, _GA100, **_AMPERE),
    _device("A100 PCIe 40GB", "a100 pcie 40gb", 40, 1555, _A100, _GA100, **_AMPERE),
    _device("A100 PCIe 80GB", "a100 pcie 80gb", 80, 1935, _A100, _GA100, **_AMPERE),
    _device("A800 SXM 80GB", "a800 sxm4 80gb", 80, 2039, _A800, _GA100, **_AMPERE),
    _device("H100 SXM", "h100 80gb hbm3", 80, 3350, _H100, _GH100, **_HOPPER),
    _device("H100 SXM 96GB", "h100 96gb", 96, 2400, _H100_96, _GH100, **_HOPPER),
    _device("H100 PCIe", "h100 pcie", 80, 2000, _H100, _GH100_PCIE, **_HOPPER_PCIE),
    _device("H100 NVL", "h100 nvl", 94, 3900, _H100, _GH100, **_HOPPER_NVL),
    _device("H800 SXM", "h800", 80, 3350, _H800, _GH100, **(_HOPPER | {"float64": 1.0})),
    _device("H200", "h200", 141, 4800, _H200, _GH100, **_HOPPER),
    _device("H200 NVL", "h200 nvl", 141, 4800, _H200, _GH100, **_HOPPER_NVL),
    _device(
        "B200",
        "b200",
        180,
        8000,
        _B200,
        _GB100,
        float4=9000,
        half=2250,
        float8=4500,
        tf32=1125,
        float32=75,
        float64=37,
    ),
    _device(
        "GB200",
        "gb200",
        186,
        8000,
        _GB200,
        _GB100_GRACE,
        float4=10000,
        half=2500,
        float8=5000,
        tf32=1250,
        float32=80,
        float64=40,
    ),
    _device(
        "B300",
        "b300",
        268,
        8000,
        _B300,
        _GB100,
        float4=13500,
        half=2250,
        float8=4500,
        tf32=1125,
        float32=75,
        float64=1.2,
    ),
    _device(
        "GB300",
        "gb300",
        277,
        8000,
        _GB300,
        _GB100_GRACE,
        float4=15000,
        half=2500,
        float8=5000,
        tf32=1250,
        float32=80,
        float64=1.3,
    ),
    _device("MI300X", "mi300x", 192, 5300, _MI300, _CDNA3, **_MI300_RATES),
    _device("MI325X", "mi325x", 256, 6000, _MI325, _CDNA3, **_MI300_RATES),
    _device(
        "MI355X", "mi355x", 288, 8000, _MI355, _CDNA4, half=2516.6, float8=5033.2, float32=157.3, float64=78.6
    ),
    _device("TPU v4", "tpu v4", 32, 1228, _TPU_V4, _TPU, bfloat16=275),
    _device("TPU v5p", "tpu v5p", 95, 2765, _TPU_V5P, _TPU, bfloat16=459),
    _device("Trainium2", "trainium2", 96, 2900, _TRN2, _UNKNOWN, half=667, float8=1299, float32=181),
    _device("laptop core", "laptop core", 2, 6.4, _LAPTOP, _CORE, half=0.096, float32=0.096, float64=0.048),
)
