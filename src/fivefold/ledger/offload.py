"""Optimizer states in the host's memory: which they are, and how much of them is on the device at a time.

What the model computes with stays on the device, and so do gradients. What only the optimizer uses lies in
host memory: moments and averages, and master weights where they are a copy of their own. FSDP's shards are
what it gathers from: under ZeRO 1 to 3 masters stay.
"""

import numpy as np

from fivefold.ledger.setup import Number, Setup

PART = 1 << 23
"""Elements of a parameter that travel at a time: 32 MiB in float32, and 0.6 ms over PCIe 5.0."""
BUFFERS = 3
"""Parts on the device at a time: one that comes, one that is updated, one that goes."""


def masters_on_host(setup: Setup) -> bool:
    """Whether master weights lie in host memory, too."""
    return setup.offload and setup.zero == 0 and setup.precision.mixed


def host_bytes(setup: Setup, elements: Number, tensors: Number) -> Number:
    """Bytes in host memory of `elements` weights in `tensors` parameters, which a rank updates."""
    if not setup.offload:
        return 0 * elements
    return elements * travelling_bytes(setup) + setup.counter_bytes(tensors)


def travelling_bytes(setup: Setup) -> int:
    """Of each weight, what travels to the device for an update, and back."""
    masters = setup.precision.master_bytes if masters_on_host(setup) else 0
    return int(masters + setup.moment_bytes(1)) if setup.offload else 0


def buffer_bytes(setup: Setup, largest: Number) -> Number:
    """Bytes of the parts that are on the device during an update; `largest`: elements of a parameter."""
    found: Number = BUFFERS * travelling_bytes(setup) * np.minimum(largest, PART)
    return found
