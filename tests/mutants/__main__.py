"""`make mutants`, or `python -m tests.mutants [WORDS]`: plant every bug and report who survived.

Outcomes are kept in `build/mutants.json`: a run that was stopped goes on where it was, and a bug is tried
again only when it, its file or its tests have changed. Exit 0: at least 95% were caught and every survivor
has its reason in the table.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeVar

from tests.mutants.outcomes import Outcomes, green_fingerprint
from tests.mutants.plant import Outcome, copy_of_repository, end_all, run_tests, tried
from tests.mutants.report import is_enough, report
from tests.mutants.table import Mutant, mutants

Task = TypeVar("Task")
Result = TypeVar("Result")
STOPPED, RED = 130, 2


def in_copies(
    tasks: Sequence[Task], act: Callable[[Task, Path], Result], workers: int
) -> Generator[tuple[Task, Result]]:
    """What `act` makes of each task and a copy of the repository, as they come.

    Whoever stops in the middle leaves no process behind, and no copy.
    """
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    done: queue.SimpleQueue[tuple[Task, Result] | BaseException] = queue.SimpleQueue()
    stopping = threading.Event()

    def work(folder: Path) -> None:
        try:
            while not stopping.is_set():
                task = waiting.get_nowait()
                done.put((task, act(task, folder)))
        except queue.Empty:
            return
        except BaseException as error:  # the thread would die in silence, and all others wait for it
            done.put(error)

    with ExitStack() as held:
        folders = [held.enter_context(copy_of_repository()) for _ in range(min(workers, len(tasks)))]
        threads = [threading.Thread(target=work, args=(folder,), daemon=True) for folder in folders]
        try:
            for thread in threads:
                thread.start()
            for _ in tasks:
                if isinstance(found := done.get(), BaseException):
                    raise found
                yield found
        finally:
            stopping.set()
            for folder in folders:
                end_all(folder)
            for thread in threads:
                thread.join()


def try_all(left: Sequence[Mutant], outcomes: Outcomes, workers: int) -> None:
    """Plant the bugs, the longest first, and keep what becomes of each."""

    def attempt(mutant: Mutant, folder: Path) -> tuple[str, Outcome]:
        return mutant.fingerprint(folder), tried(mutant, folder)

    rest = {mutant.name: outcomes.seconds(mutant) for mutant in left}
    ordered = sorted(left, key=lambda mutant: -rest[mutant.name])
    with closing(in_copies(ordered, attempt, workers)) as results:
        for number, (mutant, (fingerprint, outcome)) in enumerate(results, start=1):
            outcomes.keep(mutant, fingerprint, outcome)
            rest.pop(mutant.name)
            print(
                f"{number:4} of {len(left)}  {outcome.verdict:8} {outcome.seconds:4.0f} s  "
                f"{mutant.room}: {mutant.name}   (about {sum(rest.values()) / workers / 60:.0f} min left)",
                flush=True,
            )
            if outcome.verdict == "invalid":
                print(f"              {outcome.said}", flush=True)


def red_without_a_bug(chosen: Sequence[Mutant], outcomes: Outcomes, workers: int) -> list[str]:
    """Tests of the tables that fail on the code as it is: they would catch anything."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in sorted({test for mutant in chosen for test in mutant.tests}):
        if not outcomes.is_green(test):
            by_file[test.partition("::")[0]].append(test)
    red = []

    def attempt(file: str, folder: Path) -> tuple[dict[str, str], Outcome]:
        prints = {test: green_fingerprint(test, folder) for test in by_file[file]}
        return prints, run_tests(by_file[file], folder, first_failure=False)

    with closing(in_copies(list(by_file), attempt, workers)) as results:
        for number, (file, (prints, outcome)) in enumerate(results, start=1):
            passed = outcome.verdict == "survived"
            colour = "green" if passed else "red"
            print(f"{number:4} of {len(by_file)}  {colour:8} {outcome.seconds:4.0f} s  {file}", flush=True)
            if passed:
                outcomes.keep_green(prints)
            else:
                red += outcome.said.splitlines()
    return red


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only bugs whose room or name has one of these words in it")
    parser.add_argument("--again", action="store_true", help="forget the outcomes that are known")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="bugs that are tried at a time")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a bug before")
    parser.add_argument("--report", action="store_true", help="try none: report what is known")
    given = parser.parse_args()
    chosen = [m for m in mutants() if not given.words or any(w in f"{m.room}: {m.name}" for w in given.words)]
    if not chosen:
        parser.error(f"no bug has one of these words in its room or name: {' '.join(given.words)}")
    outcomes = Outcomes()
    left = [mutant for mutant in chosen if given.again or outcomes.of(mutant) is None]
    workers = max(1, given.workers or 1)
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background Ctrl-C would be ignored
        signal.signal(number, signal.default_int_handler)
    try:
        if not given.report:
            print(f"{len(chosen)} bugs, {len(left)} to try", flush=True)
            if not given.trust and (red := red_without_a_bug(left, outcomes, workers)):
                print("These tests fail without a bug, so they say nothing:", *red, sep="\n")
                return RED
            try_all(left, outcomes, workers)
    except KeyboardInterrupt:
        print("\nstopped: what is known is kept, and the same command goes on from here", file=sys.stderr)
        return STOPPED
    known = {mutant.name: outcomes.of(mutant) for mutant in chosen}
    print(f"\n{report(chosen, known)}")
    return 0 if is_enough(chosen, known) else 1


if __name__ == "__main__":
    sys.exit(main())
