"""How much memory this machine can still give to programs, by the system and the limits of a container."""

import os
from collections.abc import Iterator
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that programs started now can have together: what is free or can be freed, and free swap.

    A control group of this process (a container, a batch job) may allow less. Where the system does not say
    (macOS), all of the machine's memory.

    root  where `proc` and `sys` are found
    """
    told = _table(root / "proc/meminfo")
    if "MemAvailable" in told:
        there = (told["MemAvailable"] + told.get("SwapFree", 0)) * 1024
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min([there, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """What each control group that this process is in, and that has a limit, has left."""
    for folder in _groups(root):
        for limit, usage in (("memory.max", "memory.current"), _VERSION_1):
            most, used = _number(folder / limit), _number(folder / usage)
            if most is not None and used is not None:
                # Pages of files are counted as used, and given up when somebody needs the memory.
                stat = _table(folder / "memory.stat")
                prefix = "total_" if limit == _VERSION_1[0] else ""
                files = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
                yield most - max(0, used - files)


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process' memory control groups, version 2 or 1, from its own up to the topmost."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inner = top / path.strip("/")
        # Inside a container the path may be the host's: then only the topmost is there.
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(top))


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number: `MemAvailable:  24 kB`, `active_file 4096`."""
    try:
        rows = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or it says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
