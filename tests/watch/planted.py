"""Runs with a planted hang: `python -m tests.watch.planted JOB.toml RANKS --section.key=value ...`

Like `fivefold train`. The file `planted` in the run's folder names what goes wrong, once, in the rank and the
step below. RANKS is 0 where a launcher says it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from fivefold.comm import buckets
from fivefold.comm.world import World
from fivefold.config import load
from fivefold.data import batch, loader
from fivefold.problems import BadNews
from fivefold.training import launch, run, step

RANK, STEP = 1, 6


def train_rank(job: Any, world: World, folder: Path, *more: Any) -> Any:
    kind = (folder / "planted").read_text() if (folder / "planted").exists() else ""
    if kind and world.rank == RANK:
        PLANTS[kind](folder)
    return original(job, world, folder, *more)


original = run.train_rank
vars(launch)["train_rank"] = train_rank  # in this process, and in the ranks, which import this module


def once(folder: Path) -> bool:
    """Whether it has not happened yet: what was planted is gone with it."""
    if not (folder / "planted").exists():
        return False
    (folder / "planted").unlink()
    return True


def sleep_in_data_loading(folder: Path) -> None:
    collate, made = batch.collate, list[int]()

    def sleepy(*args: Any) -> batch.Batch:
        made.append(1)
        if len(made) == STEP and once(folder):
            time.sleep(600)
        return collate(*args)

    vars(loader)["collate"] = sleepy


def in_step(folder: Path, what: Any) -> None:
    """Call `what` at the start of the step's backward."""
    backward = step.Step._backward_one_by_one
    steps: list[int] = []

    def planted(self: step.Step, *args: Any) -> Any:
        steps.append(1)
        if len(steps) == STEP and once(folder):
            what()
        return backward(self, *args)

    step.Step._backward_one_by_one = planted  # type: ignore


def loop_for_ever(folder: Path) -> None:
    def spin() -> None:
        while True:
            pass

    in_step(folder, spin)


def skip_a_collective(folder: Path) -> None:
    """Rank 1 takes one bucket's gradients for summed."""

    class Summed:
        def __init__(self, x: Any, group: Any):
            self.x = x

        def add(self) -> None: ...

        def result(self) -> Any:
            return self.x

    def skip() -> None:
        vars(buckets)["PlainSum"] = Summed

    in_step(folder, skip)


def be_slow(folder: Path) -> None:
    """Rank 1 takes a fifth of a second more for every step."""
    backward = step.Step._backward_one_by_one

    def slow(self: step.Step, *args: Any) -> Any:
        time.sleep(0.2)
        return backward(self, *args)

    step.Step._backward_one_by_one = slow  # type: ignore


PLANTS = {
    "sleep": sleep_in_data_loading,
    "loop": loop_for_ever,
    "skip": skip_a_collective,
    "slow": be_slow,
}


def main() -> None:
    file, nproc, *settings = sys.argv[1:]
    job = load(file, None, settings)
    try:
        print(f"ended at step {launch.train(job, int(nproc) or None).steps}")
    except BadNews as error:
        print(error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    from tests.watch import planted

    planted.main()
