"""`make mutants`, or `python -m tests.mutants [WORDS]`: plant every bug and report who survived.

Outcomes are kept in `build/mutants.json`: a run that was stopped goes on where it was, and a bug is tried
again only when it, its file or its tests have changed. Exit 0: at least 95% were caught and every survivor
has its reason in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from tests.mutants.plant import Outcome, copy_of_repository, run_tests, tried
from tests.mutants.table import REPOSITORY, Mutant, mutants

KEPT = REPOSITORY / "build" / "mutants.json"
ENOUGH = 0.95


class Outcomes:
    """What is known of each bug, on disk after every one."""

    def __init__(self, path: Path = KEPT) -> None:
        self.path = path
        self.known: dict[str, dict[str, object]] = json.loads(path.read_text()) if path.exists() else {}
        self._lock = threading.Lock()

    def of(self, mutant: Mutant) -> Outcome | None:
        entry = self.known.get(mutant.name)
        if entry is None or entry["fingerprint"] != mutant.fingerprint():
            return None
        return Outcome(**{key: entry[key] for key in ("verdict", "said", "seconds")})  # type: ignore[arg-type]

    def keep(self, mutant: Mutant, outcome: Outcome) -> None:
        with self._lock:
            self.known[mutant.name] = {"fingerprint": mutant.fingerprint(), **asdict(outcome)}
            self.path.parent.mkdir(exist_ok=True)
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps(self.known, indent=1))
            fresh.replace(self.path)


def try_all(left: Sequence[Mutant], outcomes: Outcomes, workers: int) -> None:
    """Plant the bugs, each in one of `workers` copies of the repository."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in left:
        waiting.put(mutant)
    done = threading.Semaphore(0)

    def work(folder: Path) -> None:
        while True:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return done.release()
            outcome = tried(mutant, folder)
            outcomes.keep(mutant, outcome)
            print(f"{outcome.verdict:8} {outcome.seconds:5.0f} s  {mutant.room}: {mutant.name}", flush=True)

    with ExitStack() as held:
        for _ in range(min(workers, len(left))):
            folder = held.enter_context(copy_of_repository())
            threading.Thread(target=work, args=(folder,), daemon=True).start()
        for _ in range(min(workers, len(left))):
            done.acquire()


def red_without_a_bug(chosen: Sequence[Mutant]) -> str | None:
    """Tests of the tables that fail on the code as it is: they would catch anything."""
    with copy_of_repository() as folder:
        outcome = run_tests(sorted({test for m in chosen for test in m.tests}), folder, first_failure=False)
    return None if outcome.verdict == "survived" else outcome.said


def report(chosen: Sequence[Mutant], outcomes: Outcomes) -> int:
    """Print what became of the bugs, room by room, and the survivors; the exit code."""
    by_room: dict[str, list[str]] = defaultdict(list)
    survivors = []
    for mutant in chosen:
        outcome = outcomes.of(mutant)
        verdict = outcome.verdict if outcome else "not tried"
        by_room[mutant.room].append(verdict)
        if verdict != "caught":
            survivors.append((mutant, verdict, outcome.said if outcome else ""))
    print(f"\n{'room':14} planted  caught")
    for room, verdicts in by_room.items():
        print(f"{room:14} {len(verdicts):7} {verdicts.count('caught'):7}")
    caught = len(chosen) - len(survivors)
    print(f"{'all':14} {len(chosen):7} {caught:7}  ({caught / len(chosen):.1%})")
    for mutant, verdict, said in survivors:
        print(
            f"\n{verdict}: {mutant.name} ({mutant.path})\n  {mutant.survives or said or 'no reason is known'}"
        )
    unexplained = [m for m, verdict, _ in survivors if verdict != "survived" or m.survives is None]
    return int(bool(unexplained) or caught < ENOUGH * len(chosen))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only bugs whose room or name has one of these words in it")
    parser.add_argument("--again", action="store_true", help="forget the outcomes that are known")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="bugs that are tried at a time")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a bug before")
    given = parser.parse_args()
    chosen = [m for m in mutants() if not given.words or any(w in f"{m.room}: {m.name}" for w in given.words)]
    if not chosen:
        parser.error(f"no bug has one of these words in its room or name: {' '.join(given.words)}")
    outcomes = Outcomes()
    left = [mutant for mutant in chosen if given.again or outcomes.of(mutant) is None]
    print(f"{len(chosen)} bugs, {len(left)} to try", flush=True)
    if left and not given.trust and (red := red_without_a_bug(left)):
        print(f"These tests fail without a bug, so they say nothing:\n{red}")
        return 2
    try_all(left, outcomes, given.workers)
    return report(chosen, outcomes)


if __name__ == "__main__":
    sys.exit(main())
