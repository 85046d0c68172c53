"""How many threads compute on CPUs, and how they wait for each other.

Torch computes with OpenMP: threads that meet at the end of each operation, thousands of times a second. By
default they wait by spinning. Beside another busy process a spinning thread holds the core that the thread it
waits for needs, and each meeting takes a time slice: training then runs at a few percent of its speed.
Threads that sleep while they wait lose nothing but the time to wake up.
"""

import os
from collections.abc import MutableMapping


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wait_asleep(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP's threads sleep while they wait, unless the user has said otherwise.

    OpenMP reads it when torch is imported: this must come first. Processes that this one starts inherit it.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & environ.keys():
        environ["OMP_WAIT_POLICY"] = "passive"


def share_cores(ranks: int) -> None:
    """Give this process its share of the cores, as one of `ranks` that compute on them."""
    import torch

    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores() // ranks)))
