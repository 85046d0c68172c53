"""What the heartbeat's thread must not do to the thread that it looks at."""

from __future__ import annotations

import time
import weakref
from pathlib import Path

from fivefold.watch.heartbeat import LOOK_S, Heartbeat


class Gradient:
    """Something that a step holds in a variable."""


def _step() -> weakref.ref[Gradient]:
    held = Gradient()
    time.sleep(1.5 * LOOK_S)  # so that it is looked at in here
    return weakref.ref(held)


def test_what_a_step_held_goes_with_it(tmp_path: Path) -> None:
    """Kept until the next look, a step's gradients would lie beside those of the next one."""
    with Heartbeat(tmp_path, 0, 1):
        for _ in range(5):
            gone = _step()
            time.sleep(0.02)
            assert gone() is None
