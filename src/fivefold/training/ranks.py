"""Starting ranks as processes of this machine, and getting back results, or the error that came first.

The ranks are forked from a server process that has imported torch once, so that eight of them start in
a fraction of a second. Whatever happens to the process that called `run_ranks`, its ranks do not outlive it.
"""

import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

from fivefold.comm.compat import IMPORTED_BY_OPTIMIZERS
from fivefold.comm.world import DeviceKind, World, device_of, joined, single_world
from fivefold.problems import BadInput
from fivefold.threads import share_cores
from fivefold.training.failures import RankFailure, RanksFailed
from fivefold.training.stopping import (
    PASSED_ON,
    STOPPING_S,
    Stopped,
    StopRequest,
    held_back,
    leaving,
    let_through,
    listening,
)

T = TypeVar("T")

# Imported once, before the ranks are forked.
PRELOAD = ["torch", IMPORTED_BY_OPTIMIZERS, "torch.distributed.fsdp", "fivefold.training.run"]
GRACE_S, ENDING_S = 5.0, 3.0
"""How long ranks have to end by themselves; and those that are told to, before they are killed."""
LOOK_S = 0.5
"""How often it is looked whether this process was asked to stop."""
UNGUARDED = 77
"""The exit code of a rank whose import of the user's script came upon a start of ranks."""
NO_GUARD = (
    "{script}: ranks import this script, and it starts ranks when it is imported. "
    'Put what it does under `if __name__ == "__main__":`.'
)


def run_ranks(
    function: Callable[..., T],
    ranks: int,
    *args: Any,
    device: DeviceKind = "cpu",
    errors: Path | None = None,
    stoppable: bool = False,
    busy: Callable[[], bool] = lambda: False,
    watch: Callable[[], RankFailure | None] = lambda: None,
) -> list[T]:
    """`function(world, *args)` on every rank, each in a process of its own; the results by rank.

    One rank runs in this process. Otherwise `function` must be importable by name, and its arguments and
    result picklable. When a rank fails all are stopped, and `RanksFailed` is raised (or `BadInput`, when
    that is what the rank raised). Each failed rank leaves `rank-N.json` in the folder `errors`.

    stoppable  ranks listen to SIGUSR1: a signal that asks this process to stop is passed on to them, and
               they have `STOPPING_S` to end by themselves
    busy       whether ranks that were asked to stop may take longer than that, as while they save
    watch      asked every `LOOK_S` of ranks that are stoppable; what it returns is the failure that ends all
    """
    stop_if_imported()
    if ranks == 1:
        world = single_world(device)
        with joined(world), recorded(world, errors):
            return [function(world, *args)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # by itself: starting it lets signals through again
    # The server tells how ranks ended, so it must outlive a signal to all processes. Whoever else starts
    # processes from it has them `let_through` signals, as ranks do.
    with held_back():
        forkserver.ensure_running()
    members: list[_Member] = []
    stopping = listening(lambda: _pass_on(members)) if stoppable else _termination_raises()
    with tempfile.TemporaryDirectory(prefix="fivefold-") as folder, stopping as stop:
        try:
            for rank in range(ranks):
                if stop is not None and stop.signal is not None:
                    raise Stopped(stop.signal)  # all ranks are needed for a step: there is nothing to save
                here, there = context.Pipe(duplex=False)
                start = (rank, ranks, device, f"{folder}/store", errors, there, function, args)
                process = context.Process(target=_rank_main, args=start, name=f"rank {rank}", daemon=False)
                process.start()
                there.close()
                members.append(_Member(rank, process, here))
            results, failures = _collect(members, errors, stop, busy, watch)
            if failures and stop is not None and stop.signal is not None:
                raise Stopped(stop.signal)
            if not failures:
                _await([member.process for member in members])
        finally:
            _stop([member.process for member in members])
    if failures:
        raise RanksFailed(failures, errors)
    return [results[rank] for rank in range(ranks)]


@contextmanager
def recorded(world: World, errors: Path | None) -> Iterator[None]:
    """Leave `rank-N.json` in `errors` when the block fails; bad input is the user's to read, not recorded."""
    try:
        yield
    except (BadInput, KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:
        if errors is not None:
            RankFailure.of(world.rank, error).write(errors)
        raise


# --- in the starting process -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Member:
    rank: int
    process: ForkServerProcess
    replies: Connection


def _pass_on(members: list[_Member]) -> None:
    """Ask the ranks to stop."""
    for member in members:
        if member.process.is_alive() and member.process.pid is not None:
            os.kill(member.process.pid, PASSED_ON)


def _collect(
    members: list[_Member],
    errors: Path | None,
    stop: StopRequest | None = None,
    busy: Callable[[], bool] = lambda: False,
    watch: Callable[[], RankFailure | None] = lambda: None,
) -> tuple[dict[int, Any], list[RankFailure]]:
    """Results and failures by rank, until all have ended or the cause of a failure is known.

    Raises `Stopped` when ranks that were asked to stop have not done so in time.
    """
    results: dict[int, Any] = {}
    failures: list[RankFailure] = []
    running = {member.rank: member for member in members}
    deadline: float | None = None
    while running and all(failure.is_echo for failure in failures):
        if stop is not None and stop.signal is not None and stop.seconds > STOPPING_S and not busy():
            raise Stopped(stop.signal)
        if failures and deadline is None:
            deadline = time.monotonic() + GRACE_S  # for the cause to show up behind its echo
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        if stop is not None:  # a signal does not end the waiting by itself
            left = min(left or LOOK_S, LOOK_S)
            if not failures and (stalled := watch()) is not None:
                for member in running.values():
                    member.process.kill()  # asking would be in vain
                return results, [stalled]
        ready = wait([end for m in running.values() for end in (m.replies, m.process.sentinel)], left)
        for member in list(running.values()):
            if member.replies not in ready and member.process.sentinel not in ready:
                continue
            del running[member.rank]
            outcome = _outcome(member)
            if isinstance(outcome, BadInput):
                raise outcome
            if isinstance(outcome, RankFailure):
                failures.append(outcome)
                if errors is not None:
                    outcome.write(errors)
            else:
                results[member.rank] = outcome[0]
    return results, failures


def _outcome(member: _Member) -> tuple[Any] | RankFailure | BadInput:
    """What a rank sent before it ended, or how it ended without a word."""
    try:
        if member.replies.poll():
            reply: tuple[Any] | RankFailure | BadInput = pickle.loads(member.replies.recv_bytes())
            return reply
    except (EOFError, OSError):
        pass
    member.process.join(GRACE_S)
    code = member.process.exitcode
    if code == UNGUARDED:
        print(NO_GUARD.format(script=sys.modules["__main__"].__file__), file=sys.stderr)
        raise SystemExit(2)
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory, perhaps)" if name == "SIGKILL" else ""
        return RankFailure(member.rank, time.time(), "Killed", f"the process was ended by {name}{hint}")
    return RankFailure(
        member.rank, time.time(), "Exited", f"the process ended with exit code {code}, without a result"
    )


def _await(processes: list[ForkServerProcess]) -> None:
    """Give ranks that have sent their result the time to leave their group and end by themselves."""
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _stop(processes: list[ForkServerProcess]) -> None:
    """End the processes that still run: asked first, then killed."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + ENDING_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def _termination_raises() -> Iterator[StopRequest | None]:
    """SIGTERM ends the block like Ctrl-C does, so that it is left through its `finally`."""
    with leaving():
        yield None


# --- in a rank -------------------------------------------------------------------------------------------


def _rank_main(
    rank: int,
    ranks: int,
    device: DeviceKind,
    store: str,
    errors: Path | None,
    replies: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the starting one stops us
    signal.signal(PASSED_ON, StopRequest().receive)  # noted, until somebody listens
    let_through()
    threading.Thread(target=_die_with_parent, args=(store,), daemon=True).start()
    share_cores(ranks)
    world = World(rank, ranks, rank, device_of(rank, device), "own")
    try:
        with joined(world, store):
            try:
                reply = pickle.dumps((function(world, *args),))
            except BaseException as error:
                _end_with(error, rank, replies)  # at once: leaving the group could wait for peers that hang
        replies.send_bytes(reply)
    except BaseException as error:
        _end_with(error, rank, replies)


def stop_if_imported() -> None:
    """End this process if it is a rank that imports the user's script, which must not start ranks in turn.

    Silently: the process that started the rank knows the exit code, and says it once for all of them.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


def _end_with(error: BaseException, rank: int, replies: Connection) -> None:
    """Report the error and end this process, without the clean-up that needs other ranks."""
    replies.send_bytes(pickle.dumps(error if isinstance(error, BadInput) else RankFailure.of(rank, error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _die_with_parent(store: str) -> None:
    """Wait for the starting process to end, then remove what it could not, and end this one.

    (The kernel's parent-death signal would not do: the parent here is the server, which ends after us.)
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(Path(store).parent, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)
