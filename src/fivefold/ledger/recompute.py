"""What a recompute setting means: how many layers are run forward again at a time."""

import math


def segment_length(mode: str, layers: int) -> int | None:
    """How many layers one segment spans, or None when whole layers are not recomputed."""
    if mode == "full":
        return 1
    if mode == "sqrt":
        return max(1, round(math.sqrt(layers)))
    if mode.startswith("every-"):
        return min(int(mode.removeprefix("every-")), layers)
    return None
