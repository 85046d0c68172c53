"""Asking a run to stop: SIGTERM, SIGINT or SIGUSR1 is noted, and all ranks stop after the same step.

A second one stops at once, unless it is the same request by another way: whoever ends a job may signal all
its processes, and the one that started the ranks passes it on. No torch here.
"""

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PASSED_ON = signal.SIGUSR1
"""What ranks get from the process that started them, perhaps long after they were signalled themselves."""
ONE_REQUEST_S = 1.0
"""Signals that come within this time of the first are one request."""
SAVE, STOP = 1.0, 2.0**20
"""What ranks ask each other for after a step; with up to a million ranks that ask, sums stay apart."""
STOPPING_S = 15.0
"""How long a run that is asked to stop has to come to the end of a step."""
AGAIN_S = 0.05
"""How long after an exception that Python has dropped the signal is sent again."""


class Stopped(SystemExit):
    """A signal ended the run before all was saved, or before it began; the exit code is 128 + its number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.signal = signal.Signals(number)
        self.told = False  # whether a person has read of it

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


class StopRequest:
    """Whether this process was asked to stop, and by which signal.

    forward  called with the first signal
    limit    after so many seconds without `cancel` it counts as asked twice; None is never
    """

    def __init__(self, forward: Callable[[], None] = lambda: None, limit: float | None = None):
        self.signal: signal.Signals | None = None
        self._at = 0.0
        self._forward = forward
        self._limit = limit
        self._timer: threading.Timer | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._at = signal.Signals(number), time.monotonic()
            if self._limit is not None:
                self._timer = threading.Timer(self._limit, os.kill, (os.getpid(), number))
                self._timer.daemon = True
                self._timer.start()
            self._forward()
        elif self.seconds > ONE_REQUEST_S and (number != PASSED_ON or self.signal == PASSED_ON):
            warnings.simplefilter("ignore")  # torch warns of what is cut off, with a traceback
            raise Stopped(number)

    def cancel(self) -> None:
        """Take as long as it needs from here on: the end of a step was reached."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def seconds(self) -> float:
        """How long ago it was."""
        return time.monotonic() - self._at if self.signal is not None else 0.0


@contextmanager
def listening(
    forward: Callable[[], None] = lambda: None, limit: float | None = None
) -> Iterator[StopRequest]:
    """Note the signals that ask to stop, inside the block; outside of the main thread none arrive.

    A request that was noted before, by whoever listened until now, is taken over.
    """
    request = StopRequest(forward, limit)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {each: signal.signal(each, request.receive) for each in SIGNALS}
    for handler in before.values():
        earlier = getattr(handler, "__self__", None)
        if isinstance(earlier, StopRequest) and earlier.signal is not None and request.signal is None:
            request.receive(earlier.signal, None)
    try:
        with warnings.catch_warnings(), _never_dropped():
            yield request
    finally:
        request.cancel()
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _never_dropped() -> Iterator[None]:
    """Python drops what is raised in a destructor or a callback, and says so. `Stopped` is raised again."""
    usual = sys.unraisablehook

    def hook(dropped: "sys.UnraisableHookArgs") -> None:
        if isinstance(dropped.exc_value, Stopped):
            again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), dropped.exc_value.signal))
            again.daemon = True
            again.start()
        else:
            usual(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual


@contextmanager
def leaving() -> Iterator[None]:
    """SIGTERM and SIGUSR1 end the block as Ctrl-C does, through its `finally`: nothing is to be saved yet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = {each: signal.signal(each, leave) for each in SIGNALS if each != signal.SIGINT}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def held_back() -> Iterator[None]:
    """Processes that are started inside the block do not get these signals until they `let_through` them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """Get the signals from here on, and those that came before."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
