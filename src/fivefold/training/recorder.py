"""Recording some steps of one rank with torch's profiler, and nothing before or after them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule, supported_activities

from fivefold.watch.trace import OURS, STEP

FAILURES = (RuntimeError, AssertionError)
"""What torch's profiler raises where it cannot go on."""


class Recorder:
    """Records the steps of a range: `begin` and `end` are called around each step, recorded or not.

    The step before them is the profiler's warm-up. On a GPU the first step begins, and the last one ends,
    when the device is done with all before; between steps it is not waited for.

    steps    their numbers, one after the other; none: nothing is recorded
    taken    those that were recorded
    problem  why there is no record, in words
    """

    def __init__(self, steps: range, device: torch.device):
        self.steps, self.device = steps, device
        self.taken: list[int] = []
        self.problem: str | None = None
        self._profiler: profile | None = None
        self._step: record_function | None = None
        self._phase: record_function | None = None

    @property
    def recording(self) -> bool:
        """Whether the profiler runs, be it to warm up."""
        return self._profiler is not None

    @property
    def finished(self) -> bool:
        """Whether there is a record to be written."""
        return bool(self.taken) and self._profiler is not None and not self.steps

    def begin(self, step: int) -> None:
        if not self.steps:
            return
        if step == self.steps.start - 1:
            self._warm_up()
        elif step in self.steps and self._profiler is not None and self._step is None:
            self._synchronise()
            self._open(step)

    def end(self, step: int, pauses: bool = False, over: bool = False) -> None:
        """A step has been taken.

        pauses  before the next one comes something that is no step, such as a validation
        over    the run stops here
        """
        if self._profiler is None or not self.steps:
            return
        if step == self.steps.start - 1:
            self._try(self._profiler.step)
        elif self._step is not None:
            over = over or step == self.steps[-1]
            if over or pauses:
                self._synchronise()
            self._close()
            self.taken.append(step)
            if not over and not pauses:
                self._open(step + 1)
        if over and self._profiler is not None:
            self._try(self._profiler.stop)
            self.steps = range(0)

    def telling(self, tell: Callable[[str, int], None]) -> Callable[[str, int], None]:
        """`tell`, which hears of each phase of a step, with a mark in the record for each."""

        def marked(phase: str, part: int = 0) -> None:
            tell(phase, part)
            if self._step is not None:
                self._end_phase()
                self._phase = _entered(OURS + phase)

        return marked

    def give_up(self, problem: str) -> None:
        """There will be no record."""
        if self.steps:
            self.problem, self.steps = problem, range(0)
            self.close()

    def write(self, path: Path) -> None:
        """Write what was recorded, in Chrome's format."""
        assert self._profiler is not None
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None

    def close(self) -> None:
        """Stop recording, whatever there is."""
        self._close()
        if self._profiler is not None:
            with suppress(*FAILURES):
                self._profiler.stop()
            self._profiler = None

    def _warm_up(self) -> None:
        wanted = {"cuda": ProfilerActivity.CUDA}.get(self.device.type, ProfilerActivity.CPU)
        if wanted not in supported_activities():
            self.give_up(
                f"this torch ({torch.__version__}) was built without a profiler for {self.device.type}"
            )
            return
        # All steps are one to the profiler: its own marks between steps would take time of theirs.
        once = schedule(wait=0, warmup=1, active=1, repeat=1)
        self._profiler = profile(activities={ProfilerActivity.CPU, wanted}, schedule=once)
        with _quiet():
            self._try(self._profiler.start)

    def _try(self, move: Callable[[], None]) -> None:
        """Training goes on whatever the profiler says."""
        try:
            move()
        except FAILURES as error:
            self.give_up(f"torch's profiler fails: {str(error).splitlines()[0]}")

    def _open(self, step: int) -> None:
        self._step = _entered(f"{STEP}{step}")

    def _close(self) -> None:
        self._end_phase()
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _entered(name: str) -> record_function:
    mark = record_function(name)
    mark.__enter__()
    return mark


@contextmanager
def _quiet() -> Iterator[None]:
    """Kineto, below the profiler, tells on stderr when it starts and stops; once it asks how much to say."""
    asked = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if asked is None:
            del os.environ["KINETO_LOG_LEVEL"]
