"""`fivefold doctor` without a run: versions, devices, limits and space of this machine, and what is wrong."""

import os
import platform
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fivefold.bench.pairs import Compared, compare
from fivefold.comm.world import DeviceKind, device_kind
from fivefold.threads import cores
from fivefold.training.failures import RanksFailed
from fivefold.version import __version__

GIB = 2**30
FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "clock, MHz": "clocks.sm",
    "highest clock, MHz": "clocks.max.sm",
    "temperature, C": "temperature.gpu",
    "power, W": "power.draw",
    "memory errors": "ecc.errors.uncorrected.volatile.total",
    "slowed by": "clocks_throttle_reasons.active",
}
"""What nvidia-smi is asked for."""
SLOWED = {0x8: "hardware slowdown", 0x40: "heat", 0x80: "the power supply"}
ASKED_S = 20.0
LEAST_SHM, LEAST_FILES, LEAST_SPACE = 128 * 2**20, 1024, GIB
BYTES_A_PARAMETER = 12
"""Of a checkpoint: master weight and two moments, in 32 bits."""
CPU_PROCESSES = 4
Rows = list[list[str]]


@dataclass(frozen=True)
class Machine:
    """What was found; `problems` is empty when nothing is wrong."""

    versions: dict[str, str]
    devices: list[dict[str, str]]
    compared: Compared | None
    limits: dict[str, str]
    problems: list[str]

    @property
    def ok(self) -> bool:
        return not self.problems

    def sections(self) -> list[tuple[str, Rows]]:
        """Titles with tables for people."""
        found = [("versions", [[name, value] for name, value in self.versions.items()])]
        for number, device in enumerate(self.devices):
            found.append((f"GPU {number}", [[name, value] for name, value in device.items()]))
        if self.compared is not None:
            rows = [
                [f"product on {rank}", f"{rate / 1e12:.3g} TFLOP/s"]
                for rank, rate in self.compared.flops.items()
            ]
            rows += [
                [f"message {one} - {two}", f"{rate / 1e9:.3g} GB/s"]
                for (one, two), rate in self.compared.bandwidths.items()
            ]
            title = "devices" if self.compared.kind == "cuda" else "processes that share the CPU"
            found.append((title, rows))
        return [*found, ("limits", [[name, value] for name, value in self.limits.items()])]

    def told(self) -> dict[str, Any]:
        """For `--json`."""
        compared = self.compared
        return {
            "ok": self.ok,
            "problems": self.problems,
            "versions": self.versions,
            "devices": self.devices,
            "limits": self.limits,
            "flops": {} if compared is None else {str(rank): rate for rank, rate in compared.flops.items()},
            "bandwidths": {}
            if compared is None
            else {f"{one}-{two}": rate for (one, two), rate in compared.bandwidths.items()},
        }


def look(folder: Path) -> Machine:
    """Look at this machine; `folder` is where runs would be."""
    kind = device_kind()
    devices = gpus() if kind == "cuda" else []
    limits, problems = _limits(folder, kind)
    compared = None
    try:
        compared = compare(torch.cuda.device_count() if kind == "cuda" else _processes(), kind)
        problems += compared.outliers()
    except RanksFailed as error:
        problems.append(f"the devices could not be measured: {str(error).splitlines()[0]}")
    return Machine(_versions(kind, devices), devices, compared, limits, device_problems(devices) + problems)


def _versions(kind: DeviceKind, devices: list[dict[str, str]]) -> dict[str, str]:
    found = {"fivefold": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if kind == "cuda":
        nccl = torch.cuda.nccl.version()
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)
        found["driver"] = devices[0]["driver"] if devices else "unknown: nvidia-smi did not answer"
    return found | {"system": platform.platform()}


def gpus() -> list[dict[str, str]]:
    """What nvidia-smi says of each GPU; empty where it is not there or does not answer."""
    query = ",".join(FIELDS.values())
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=ASKED_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parsed(told)


def parsed(told: str) -> list[dict[str, str]]:
    """One GPU a line, values in the order of `FIELDS`."""
    lines = [[value.strip() for value in line.split(",")] for line in told.splitlines()]
    found = [dict(zip(FIELDS, line, strict=True)) for line in lines if len(line) == len(FIELDS)]
    return [device | {"slowed by": _in_words(device["slowed by"])} for device in found]


def _in_words(reasons: str) -> str:
    """What a mask of reasons says; those that are no reason for worry (idle, a chosen limit) are left out."""
    try:
        mask = int(reasons, 16)
    except ValueError:  # an old driver, or one that does not say
        return "unknown"
    return ", ".join(why for bit, why in SLOWED.items() if mask & bit) or "nothing"


def device_problems(devices: list[dict[str, str]]) -> list[str]:
    """What is wrong with GPUs by their own word."""
    problems = []
    for number, device in enumerate(devices):
        errors = device["memory errors"]
        if errors.isdecimal() and int(errors) > 0:
            problems.append(f"GPU {number}: {errors} memory errors that were not corrected; have it replaced")
        if device["slowed by"] not in ("nothing", "unknown"):
            problems.append(f"GPU {number}: slowed down by {device['slowed by']}")
    return problems


def _processes() -> int:
    return max(2, min(CPU_PROCESSES, cores()))


def _limits(folder: Path, kind: DeviceKind) -> tuple[dict[str, str], list[str]]:
    """Limits of the system, and those that are too low."""
    problems = []
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = shutil.disk_usage(folder).free
    parameters = free / BYTES_A_PARAMETER / 1e9
    found = {
        "open files": f"{files:,}",
        "space here": f"{free / GIB:,.1f} GiB: a checkpoint of {parameters:,.2f} billion parameters",
    }
    if 0 <= files < LEAST_FILES:
        problems.append(f"only {files} open files are allowed: ulimit -n 65536 allows more")
    if free < LEAST_SPACE:
        problems.append(f"only {free / GIB:.2f} GiB are free in {folder}")
    if not os.access(folder, os.W_OK):
        problems.append(f"{folder} cannot be written: runs need a folder")
    if os.path.isdir("/dev/shm"):
        shared = shutil.disk_usage("/dev/shm").total
        found["shared memory"] = f"{shared / GIB:,.2f} GiB"
        if kind == "cuda" and shared < LEAST_SHM:
            problems.append(
                f"only {shared / 2**20:.0f} MiB of shared memory, which NCCL uses: docker run --shm-size 8g"
            )
    return found, problems
