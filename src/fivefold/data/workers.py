"""Tokenising in several processes.

Run as a module this file is a worker: tasks come in by standard input, results go out by standard
output, both pickled. A plain child process and not `multiprocessing`, because that imports the user's
script again and may not be used in a daemon process. A worker ends when its input does, so none
outlives its parent, even a killed one.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from fivefold.data.documents import Piece
from fivefold.data.tokenise import Tokenised, tokenise
from fivefold.data.tokenizer import Tokenizer
from fivefold.problems import BadInput

Worker = subprocess.Popen[bytes]


def tokenise_all(tasks: Sequence[list[Piece]], tokenizer: Tokenizer, processes: int) -> Iterator[Tokenised]:
    """Every task's result, in the order of the tasks, however many processes work on them."""
    if processes <= 1:
        yield from (tokenise(task, tokenizer) for task in tasks)
        return
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def hand_out(task: list[Piece]) -> Tokenised:
        worker = idle.get()
        try:
            return _ask(worker, task)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(processes) as threads:
        workers = list(threads.map(_start_worker, [tokenizer] * processes))
        for worker in workers:
            idle.put(worker)
        pending: deque[Future[Tokenised]] = deque()
        try:
            for task in tasks:
                pending.append(threads.submit(hand_out, task))
                if len(pending) > 2 * processes:  # results must not pile up in memory
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            for worker in workers:
                worker.kill()
                worker.wait()


def _start_worker(tokenizer: Tokenizer) -> Worker:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
    worker = subprocess.Popen(
        [sys.executable, "-m", "fivefold.data.workers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    _send(worker, tokenizer)
    return worker


def _send(worker: Worker, message: object) -> None:
    assert worker.stdin is not None
    pickle.dump(message, worker.stdin)
    worker.stdin.flush()


def _ask(worker: Worker, task: list[Piece]) -> Tokenised:
    assert worker.stdout is not None
    try:
        _send(worker, task)
        answer = pickle.load(worker.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        raise RuntimeError(
            f"a process that tokenises died (exit code {worker.wait()}); fewer data.workers need less memory"
        ) from None
    if isinstance(answer, Tokenised):
        return answer
    raise BadInput(answer)


def _work() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and says so once
    tokenizer: Tokenizer = pickle.load(sys.stdin.buffer)
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: object = tokenise(task, tokenizer)
        except BadInput as error:
            answer = error.problems
        try:
            pickle.dump(answer, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            return


if __name__ == "__main__":
    _work()
