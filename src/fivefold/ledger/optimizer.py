"""What an optimizer keeps for each weight it updates."""

from fivefold.ledger.setup import Number, Setup

MOMENTS = {"adamw": 2, "sgd": 1}
"""Copies of the weights' size: AdamW's two moments; SGD's momentum."""

COUNTER_BYTES = {"adamw": 4, "sgd": 0}
"""AdamW counts steps per parameter, in a float32 scalar."""


def master_bytes(setup: Setup, shard: Number) -> Number:
    """Bytes of master weights where they are a copy of their own; `shard` elements, padding included."""
    return shard * setup.precision.master_bytes if setup.zero or setup.precision.mixed else 0 * shard


def moment_bytes(setup: Setup, elements: Number) -> Number:
    """Bytes of moments and averaged weights for `elements` weights."""
    copies = 0 if setup.optimizer == "sgd" and setup.momentum == 0 else MOMENTS[setup.optimizer]
    return elements * setup.precision.master_bytes * (copies + int(setup.ema))


def counter_bytes(setup: Setup, tensors: Number) -> Number:
    """Bytes of step counters for `tensors` parameters."""
    return COUNTER_BYTES[setup.optimizer] * tensors
