"""A rank's heartbeat: what it does is kept in memory, and a thread writes it down once a second.

The training thread only sets a tuple. How far it is in the collectives of each group is counted by torch, for
compiled code and FSDP as well, and read from there. Whether it waits for others is seen by its stack.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch.distributed as dist

from fivefold.comm.compat import entered, last_collectives
from fivefold.watch.beat import FINISHED, LOADING, Beat, Group, path_of, stack_of, write_at
from fivefold.watch.processes import STACK_SIGNAL, born

LOOK_S, WRITE_S = 0.2, 1.0
STILL_S = 2.0
"""A rank that has not moved for so long tells where it is."""
PATIENT = 3
"""What takes long in one piece, all but a later step, is given so many times the time of one."""
ENOUGH, RECENT = 20, 600
"""Looks, at least and at most, from which the share of time is taken that a rank does not wait for others."""
NAMED = 4
"""Collectives of each group that are told by name."""
WAITING = (os.path.join("torch", "distributed"), os.path.join("fivefold", "comm"))
"""Code in which a thread waits for other ranks."""
INNER = (os.path.join("torch", "_"), "threading.py", "queue.py")
"""Code whose callers say more: how torch calls an operator (`torch/_ops.py`), and waiting in a thread."""
DATA_THREAD = "data"


class Heartbeat:
    """The heartbeat of one rank. A context manager: it beats inside the block.

    stall_s   seconds without a move after which a rank has stalled; 0: never
    on_stall  called again and again while the rank stands still for longer than that
    """

    def __init__(
        self,
        run: Path,
        rank: int,
        ranks: int,
        stall_s: float = 0.0,
        on_stall: Callable[[], None] = lambda: None,
    ):
        self.run, self.rank, self.ranks, self.stall_s = run, rank, ranks, stall_s
        self._on_stall = on_stall
        self._host, self._pid, self._born = socket.gethostname(), os.getpid(), born(os.getpid())
        self._doing = (0, "start", 0)
        self._steps = 0  # begun by this process
        self._began = 0.0
        self._step_s: float | None = None
        self._groups: dict[str, tuple[dist.ProcessGroup, tuple[int, ...]]] = {}
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._stop = threading.Event()
        self._watched = threading.get_ident()
        self._looks: deque[bool] = deque(maxlen=RECENT)

    def begin(self, step: int) -> None:
        """A step begins, with its data."""
        now = time.perf_counter()
        self._steps += 1
        if self._steps > 2:  # the first one compiles
            self._step_s = now - self._began
        self._began = now
        self._doing = (step, LOADING, 0)

    def tell(self, phase: str, part: int = 0) -> None:
        """A phase of the step begins, or its next part."""
        self._doing = (self._doing[0], phase, part)

    def watch(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """The groups whose collectives are told, by axis."""
        self._groups = {
            axis: (group, tuple(dist.get_process_group_ranks(group))) for axis, group in groups.items()
        }

    def __enter__(self) -> Self:
        path = path_of(self.run, self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._stack = stack_of(self.run, self.rank).open("a", encoding="utf-8")
        if threading.current_thread() is threading.main_thread():
            faulthandler.register(STACK_SIGNAL, self._stack, all_threads=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.tell(FINISHED)
        self._stop.set()
        self._thread.join()
        if threading.current_thread() is threading.main_thread():
            faulthandler.unregister(STACK_SIGNAL)
            if signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:
                signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # whoever asks late must not end the process
        self._stack.close()
        os.close(self._file)

    # --- in the thread -----------------------------------------------------------------------------------

    def _beat(self) -> None:
        seen: object = None
        moved = wrote = 0.0
        where, names = "", dict[str, dict[int, str]]()
        looks: list[bool] = []
        while not self._stop.wait(LOOK_S):
            now, doing = time.time(), self._doing
            counts = {axis: entered(group) for axis, (group, _) in self._groups.items()}
            # No frame is kept from one look to the next: it would keep its variables, gradients among them.
            waits = waits_for_others(frames().get(self._watched))
            if (doing, counts) != seen:
                seen, moved, where, names = (doing, counts), now, "", {}
                self._looks.extend(looks)  # a hang says nothing about steps: only what led to a move counts
                looks = []
            if self._steps > 1:
                looks.append(waits)
            if now - moved >= STILL_S and not where:
                where, names = self._place(doing[1]), last_collectives()
                self._dump()
                wrote = 0.0
            if now - wrote >= WRITE_S:
                self._write(doing, counts, moved, waits, where, names)
                wrote = now
            if 0 < self._patience(doing[1]) <= now - moved:
                self._on_stall()
        self._write(self._doing, {}, time.time(), False, "", {})

    def _write(
        self,
        doing: tuple[int, str, int],
        counts: Mapping[str, int],
        moved: float,
        waits: bool,
        where: str,
        names: Mapping[str, Mapping[int, str]],
    ) -> None:
        groups = {
            axis: Group(self._groups[axis][1], count, _last(names.get(self._groups[axis][0].group_name, {})))
            for axis, count in counts.items()
        }
        beat = Beat(
            rank=self.rank,
            ranks=self.ranks,
            host=self._host,
            pid=self._pid,
            born=self._born,
            step=doing[0],
            phase=doing[1],
            part=doing[2],
            moved=moved,
            at=time.time(),
            patience=self._patience(doing[1]),
            waits=waits,
            where=where,
            step_s=self._step_s,
            busy=1 - sum(self._looks) / len(self._looks) if len(self._looks) >= ENOUGH else None,
            groups=groups,
        )
        with contextlib.suppress(OSError):  # a full disk ends no run
            write_at(self._file, beat)

    def _patience(self, phase: str) -> float:
        slow = self._steps < 2 or phase in ("checkpoint", "profile")
        return self.stall_s * (PATIENT if slow else 1)

    def _place(self, phase: str) -> str:
        """Where in the code the rank is: the data's thread, when it is the data that it waits for."""
        frame = frames().get(self._watched)
        if phase == LOADING:
            data = [each.ident for each in threading.enumerate() if each.name == DATA_THREAD]
            found = [frames().get(ident) for ident in data if ident is not None]
            frame = found[-1] if found else frame
        if (frame := _telling(frame)) is None:
            return "nowhere"
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"

    def _dump(self) -> None:
        """Leave the stacks of all threads."""
        with contextlib.suppress(OSError):
            self._stack.truncate(0)
            faulthandler.dump_traceback(self._stack, all_threads=True)


def frames() -> dict[int, FrameType]:
    """What every thread runs at this moment, by its number."""
    return sys._current_frames()


def waits_for_others(frame: FrameType | None) -> bool:
    """Whether a thread is inside a collective."""
    frame = _telling(frame)
    return frame is not None and any(part in frame.f_code.co_filename for part in WAITING)


def _telling(frame: FrameType | None) -> FrameType | None:
    """The innermost place that says something."""
    while frame is not None and any(part in frame.f_code.co_filename for part in INNER):
        frame = frame.f_back
    return frame


def _last(names: Mapping[int, str]) -> dict[int, str]:
    return {number: names[number] for number in sorted(names)[-NAMED:]}
