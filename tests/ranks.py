"""Ranks that stay: a test runs its function on them, and the next test finds them running.

`on_ranks(function, ranks, *args)` is `fivefold.training.ranks.run_ranks` for tests. Starting ranks, importing
the tests on them and making process groups takes longer than most cases do. So the ranks of each world size
live until pytest ends, and a case is a message to them. What a test may count on:

- `function(world, *args)` runs on every rank; results come back by rank. It must be importable by name, and
  arguments and results picklable. One rank is this process.
- Every call begins alike: seed, default dtype, gradients switched on, deterministic algorithms off, threads
  and the environment are as on a fresh rank, and what earlier calls left behind has been collected.
- A rank that raises or dies ends all of its world; the test gets `RanksFailed` with that rank's traceback,
  and the next call starts afresh. So it does after one that leaves more than `MOST_THREADS` threads: every
  process group has some (`tests.cases.mesh_of` keeps those of a layout).

What it may not: change modules, classes or signal handlers on a rank and leave them so, or kill it. Such
tests take `run_ranks`, as do those about starting and ending ranks.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from fivefold.comm.world import World, joined, single_world
from fivefold.training.failures import RankFailure, RanksFailed
from fivefold.training.ranks import PRELOAD
from fivefold.training.stopping import held_back, let_through

T = TypeVar("T")

MOST_THREADS = 320
"""Of all ranks of a world together: those of groups that nobody uses wake up a hundred times a second."""
ECHO_S = 2.0
"""How long the others have to fail too, when one rank has: the cause may come after its echo."""


def on_ranks(function: Callable[..., T], ranks: int, *args: Any) -> list[T]:
    """`function(world, *args)` on every rank of a world of this size; the results by rank."""
    if ranks == 1:
        return [function(single_world("cpu"), *args)]
    pool = _POOLS.get(ranks)
    if pool is None or pool.owner != os.getpid():
        pool = _POOLS[ranks] = _Pool(ranks)
    try:
        replies = pool.run(pickle.dumps((function, args)))
    except BaseException:
        _POOLS.pop(ranks).end()
        raise
    if sum(reply.threads for reply in replies) > MOST_THREADS:
        _POOLS.pop(ranks).end()
    return [reply.result for reply in replies]


@dataclass(frozen=True)
class _Reply:
    result: Any
    threads: int


@dataclass
class _Pool:
    """The ranks of one world size."""

    ranks: int
    owner: int = field(default_factory=os.getpid)
    members: list[tuple[ForkServerProcess, Connection]] = field(default_factory=list)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        resource_tracker.ensure_running()
        with held_back():
            forkserver.ensure_running()
        self.folder = tempfile.mkdtemp(prefix="fivefold-ranks-")
        for rank in range(self.ranks):
            here, there = context.Pipe()
            start = (rank, self.ranks, f"{self.folder}/store", there)
            process = context.Process(target=_serve, args=start, name=f"rank {rank}", daemon=True)
            process.start()
            there.close()
            self.members.append((process, here))

    def run(self, task: bytes) -> list[_Reply]:
        """Let every rank do the task; raises `RanksFailed` when one does not."""
        replies: dict[int, _Reply] = {}
        failures: list[RankFailure] = []
        for rank, (_, connection) in enumerate(self.members):
            try:
                connection.send_bytes(task)
            except OSError:  # it has ended since the last task
                failures.append(self._ended(rank))
        waiting = {connection: rank for rank, (_, connection) in enumerate(self.members)}
        deadline: float | None = None
        while waiting and all(failure.is_echo for failure in failures):
            if failures and deadline is None:
                deadline = time.monotonic() + ECHO_S
            ready = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in (one for one in list(waiting) if one in ready):
                rank = waiting.pop(connection)
                try:
                    reply = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    reply = self._ended(rank)
                if isinstance(reply, RankFailure):
                    failures.append(reply)
                else:
                    replies[rank] = reply
        if failures:
            raise RanksFailed(failures)
        return [replies[rank] for rank in range(self.ranks)]

    def _ended(self, rank: int) -> RankFailure:
        process = self.members[rank][0]
        process.join(ECHO_S)
        return RankFailure(rank, time.time(), "Ended", f"the process ended with exit code {process.exitcode}")

    def end(self) -> None:
        """Kill the ranks: there is nothing that they would have to tidy up."""
        for process, connection in self.members:
            process.kill()
            connection.close()
        for process, _ in self.members:
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


_POOLS: dict[int, _Pool] = {}


@atexit.register
def _end_all() -> None:
    for pool in _POOLS.values():
        if pool.owner == os.getpid():
            pool.end()


# --- in a rank ---------------------------------------------------------------------------------------------


def _serve(rank: int, ranks: int, store: str, tasks: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the starting one ends us
    let_through()
    threading.Thread(target=_die_with_parent, args=(store,), daemon=True).start()
    gc.freeze()  # what the server has imported need not be looked through after every task
    environment, world = dict(os.environ), World(rank, ranks, rank, torch.device("cpu"), "own")
    with joined(world, store):
        while True:
            try:
                task = tasks.recv_bytes()
            except EOFError:
                os._exit(0)
            try:
                _begin_afresh(environment)
                function, args = pickle.loads(task)
                result = function(world, *args)
                threads = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 0
                reply = pickle.dumps(_Reply(result, threads))
            except BaseException as error:
                reply = pickle.dumps(RankFailure.of(rank, error))
            tasks.send_bytes(reply)
            task = reply = b""
            function = args = result = None


def _begin_afresh(environment: dict[str, str]) -> None:
    gc.collect()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)


def _die_with_parent(store: str) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(Path(store).parent, ignore_errors=True)
        os._exit(1)
