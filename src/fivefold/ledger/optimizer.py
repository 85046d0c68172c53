"""What an optimizer keeps for each weight it updates."""

from __future__ import annotations

from fivefold.ledger.precision import Precision

MOMENTS = {"adamw": 2, "sgd": 1}
"""Copies of the weights' size: AdamW's two moments; SGD's momentum."""

COUNTER_BYTES = {"adamw": 4, "sgd": 0}
"""AdamW counts steps per parameter, in a float32 scalar."""


def moment_bytes(name: str, elements: int, precision: Precision, *, momentum: float, ema: bool) -> int:
    """Bytes of moments and averaged weights for `elements` weights."""
    copies = 0 if name == "sgd" and momentum == 0 else MOMENTS[name]
    return elements * precision.master_bytes * (copies + int(ema))
