"""What a machine can still give: the system's word, and the limits of control groups of both versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from fivefold.hardware.host_memory import available_memory

MIB = 2**20
MEMINFO = (
    "MemTotal:       9000 kB\nMemFree: 1 kB\nMemAvailable:    4096 kB\nSwapFree:        1024 kB\nHuge: 0\n"
)
V2, V1 = "0::/job/step\n", "4:memory:/job\n3:cpu,cpuacct:/x\n0::/\n"


def stat(active: int, inactive: int, prefix: str = "") -> str:
    return f"anon 77\n{prefix}active_file {active}\n{prefix}inactive_file {inactive}\n"


@pytest.mark.parametrize(
    ("files", "there"),
    [
        ({}, 5 * MIB),  # no control groups at all
        ({"proc/self/cgroup": V2}, 5 * MIB),  # none with a limit
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/job/memory.max": "max\n",
                "sys/fs/cgroup/job/memory.current": "500\n",
            },
            5 * MIB,
        ),
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/job/step/memory.max": f"{4 * MIB}\n",
                "sys/fs/cgroup/job/step/memory.current": "0\n",
                "sys/fs/cgroup/job/memory.max": f"{3 * MIB}\n",  # of a group around ours
                "sys/fs/cgroup/job/memory.current": f"{2 * MIB}\n",
                "sys/fs/cgroup/job/memory.stat": stat(MIB, MIB // 2),  # pages that are given up on demand
            },
            2.5 * MIB,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * MIB}\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{MIB}\n",
                "sys/fs/cgroup/memory/job/memory.stat": stat(9, 9) + stat(0, MIB // 4, "total_"),
            },
            1.25 * MIB,
        ),
        (
            {  # inside of a container, where the path is the host's
                "proc/self/cgroup": "4:memory:/docker/abc\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{MIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * MIB}\n",
            },
            0,
        ),
    ],
)
def test_the_least_of_all_limits_counts(tmp_path: Path, files: Mapping[str, str], there: float) -> None:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path) == there


def test_this_machine_has_some_and_a_system_that_does_not_say_has_all(tmp_path: Path) -> None:
    assert 0 < available_memory() <= available_memory(tmp_path)
