"""Several commands at once: their lines under their names, and one that fails ends all.

A command is asked to stop by the end of its stdin. It is in a session of its own: Ctrl-C reaches it only so.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import IO

from fivefold.training.stopping import Stopped, leaving

ECHO_S = 12.0
"""How long the cause may take to end behind its echo: ranks that lost a peer end within 10 seconds."""
MARGIN_S = 10.0
"""How long a command may take to end beyond what its ranks take to save."""
KEPT = 200
"""Lines of each command that are looked through for the cause of a failure."""
_PRINTING = threading.Lock()


@dataclass(frozen=True)
class Failure:
    """The command that failed first, with its exit code: below 0 by a signal, as `subprocess` has it."""

    name: str
    code: int


def run_together(
    commands: Mapping[str, Sequence[str]], grace_s: float, is_echo: Callable[[Sequence[str]], bool]
) -> Failure | None:
    """Run commands by name until all have ended. One that fails, Ctrl-C, SIGTERM and SIGUSR1 stop all.

    grace_s  how long commands that are asked to stop may take; then they are killed
    is_echo  whether the last lines of a command that failed say that another one is the cause
    """
    ended: SimpleQueue[_Command] = SimpleQueue()
    width = max(map(len, commands))
    running: list[_Command] = []
    with leaving():
        try:
            for name, words in commands.items():
                running.append(_Command(name, words, width, ended))
            while running:
                first = ended.get()
                running.remove(first)
                if first.code:
                    failed = _failed_with(first, running, ended, is_echo)
                    cause = next((one for one in failed if not is_echo(one.lines)), first)
                    return Failure(cause.name, cause.code)
            return None
        except (KeyboardInterrupt, Stopped) as stopped:
            names = ", ".join(command.name for command in running)
            _say(f"stopping {names}: ranks have {grace_s:.0f} s to save. Once more: at once.")
            if isinstance(stopped, Stopped):
                stopped.told = True
            raise
        finally:
            _stop(running, ended, grace_s + MARGIN_S)


class _Command:
    """One of the commands, running. Its lines are copied; when it has ended it puts itself into `ended`."""

    def __init__(self, name: str, words: Sequence[str], width: int, ended: "SimpleQueue[_Command]"):
        self.name = name
        self.lines: deque[str] = deque(maxlen=KEPT)
        self._prefix = f"{name:<{width}} | "
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        streams = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        copies = [threading.Thread(target=self._copy, args=pair, daemon=True) for pair in streams]
        for copy in copies:
            copy.start()
        threading.Thread(target=self._wait, args=(copies, ended), daemon=True).start()

    @property
    def code(self) -> int:
        return self._process.wait()

    def ask_to_stop(self) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _copy(self, source: IO[bytes], target: IO[str]) -> None:
        for raw in source:
            line = raw.decode(errors="replace").rstrip("\r\n")
            self.lines.append(line)
            with (
                _PRINTING,
                suppress(OSError, ValueError),
            ):  # nobody reads on: the command shall run all the same
                target.write(f"{self._prefix}{line}\n")
                target.flush()

    def _wait(self, copies: Sequence[threading.Thread], ended: "SimpleQueue[_Command]") -> None:
        self._process.wait()
        for copy in copies:
            copy.join(MARGIN_S)  # what it has started may hold the pipe open
        ended.put(self)


def _failed_with(
    first: _Command,
    running: list[_Command],
    ended: "SimpleQueue[_Command]",
    is_echo: Callable[[Sequence[str]], bool],
) -> list[_Command]:
    """The first to fail and those that follow, until the cause is among them; taken out of `running`."""
    failed = [first]
    deadline = time.monotonic() + ECHO_S
    while running and all(is_echo(command.lines) for command in failed):
        try:
            latest = ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            break
        running.remove(latest)
        failed += [latest] if latest.code else []
    return failed


def _stop(running: list[_Command], ended: "SimpleQueue[_Command]", patience_s: float) -> None:
    """Ask commands to stop, and kill those that do not; all have ended afterwards."""
    deadline = time.monotonic() + patience_s
    try:
        for command in running:
            command.ask_to_stop()
        while running:
            running.remove(ended.get(timeout=max(0.0, deadline - time.monotonic())))
    except Empty:
        _say(f"killed: {', '.join(command.name for command in running)}")
    finally:
        for command in running:
            command.kill()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
