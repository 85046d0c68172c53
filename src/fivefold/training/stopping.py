"""Asking a run to stop: SIGTERM, SIGINT or SIGUSR1 is noted, and all ranks stop after the same step.

A second one stops at once, unless it is the same request by another way: whoever ends a job may signal all
its processes, and the one that started the ranks passes it on. No torch here.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ONE_REQUEST_S = 1.0
"""Signals that come within this time of the first are one request."""


class StopRequest:
    """Whether this process was asked to stop, and by which signal.

    forward  called with the first signal
    """

    def __init__(self, forward: Callable[[], None] = lambda: None):
        self.signal: signal.Signals | None = None
        self._at = 0.0
        self._forward = forward

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._at = signal.Signals(number), time.monotonic()
            self._forward()
        elif self.seconds > ONE_REQUEST_S:
            raise SystemExit(128 + number)

    @property
    def seconds(self) -> float:
        """How long ago it was."""
        return time.monotonic() - self._at if self.signal is not None else 0.0


@contextmanager
def listening(forward: Callable[[], None] = lambda: None) -> Iterator[StopRequest]:
    """Note the signals that ask to stop, inside the block; outside of the main thread none arrive."""
    request = StopRequest(forward)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {each: signal.signal(each, request.receive) for each in SIGNALS}
    try:
        yield request
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
