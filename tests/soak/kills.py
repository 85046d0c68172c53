"""Runs whose processes are killed at random moments end with the weights of a run that nobody harmed.

    python -m tests.soak.kills --seed 0 --kills 30
    python -m tests.soak.kills --device cuda --ranks 1 --kills 10     # with training.deterministic

A rank that is killed is started again by the run; after the launcher was killed, the same command is run
again. Every run must end with the bytes of an unharmed one, weights and optimizer, and its sample log must
show each step's samples once. The table says what happened; the exit code is 1 where anything was lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fivefold.problems import BadNews
from fivefold.storage.folder import folder_of, verified
from fivefold.storage.manifest import DamagedError
from fivefold.training.samples import read_samples
from tests.soak.moments import MOMENTS, Watched, all_gone, arrive, ranks_of, restarts_told

STEPS, EVERY = 40, 4
LAYOUTS = {
    "zero 0": ("--layout.zero", "0"),
    "zero 3": ("--layout.zero", "3"),
    "tp 2 x pp 2": ("--layout.tp", "2", "--layout.pp", "2"),
}
SMALL = (
    *("--preset", "tiny", "--model.layers", "2", "--model.dim", "32", "--model.heads", "4"),
    *("--model.kv_heads", "2", "--model.ffn", "64", "--training.seq_len", "32"),
    *("--training.global_batch", "16", "--run.tensorboard", "false", "--optimizer.ema", "0.9"),
    *("--checkpoint.every", str(EVERY), "--resilience.restarts", "100", "--optimizer.schedule", "constant"),
)
OF_LAUNCHER = ("start", "data build")
"""Moments at which there are no ranks yet."""


@dataclass(frozen=True)
class Blow:
    """One kill: when, who (a rank by its number, or the launcher: None), and how late after the moment."""

    moment: str
    rank: int | None
    later: float

    @property
    def who(self) -> str:
        return "launcher" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True)
class Setting:
    """Where runs are made: how many ranks on what device, and the folder for all of it."""

    ranks: int
    device: str
    home: Path

    def command(self, layout: str, name: str, steps: int) -> list[str]:
        text = self.home / "text"
        if not text.exists():
            draw = random.Random(0)
            text.write_bytes(bytes(draw.choices(b"abcdefgh \n", k=4 << 20)))
        words = ("--nproc", str(self.ranks), "--run", str(self.home / name), "--training.steps", str(steps))
        split = LAYOUTS.get(layout, ())
        exact = ("--training.deterministic", "true") if self.device == "cuda" else ()
        data = ("--data.source", str(text), "--data.cache", str(self.home / f"{name}-cache"))
        return [sys.executable, "-m", "fivefold", "train", *SMALL, *words, *split, *exact, *data]

    def start(self, layout: str, name: str, steps: int) -> Watched:
        output = self.home / f"{name}.txt"
        hidden = {} if self.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        with output.open("ab") as file:
            command = self.command(layout, name, steps)
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1", **hidden}
            )
        return Watched(process, self.home / name, self.home / f"{name}-cache", output)

    @cache  # noqa: B019
    def unharmed(self, layout: str, steps: int) -> Path:
        """The folder of a run that nobody disturbs."""
        run = self.start(layout, f"unharmed {layout}", steps)
        if run.process.wait(timeout=600) != 0:
            raise SystemExit(run.output.read_text())
        return run.folder


@dataclass
class Report:
    """How a harmed run went: what was done to it, how often it started, and what is wrong with its end."""

    layout: str
    blows: list[str] = field(default_factory=list)
    starts: int = 1
    problems: list[str] = field(default_factory=list)


def harm(setting: Setting, layout: str, name: str, blows: Sequence[Blow], steps: int = STEPS) -> Report:
    """Start a run and strike it, one blow after the other; compare what it comes to with an unharmed one."""
    expected = setting.unharmed(layout, steps)
    report = Report(layout)
    run = setting.start(layout, name, steps)
    for number, blow in enumerate(blows):
        seen = set[object]() if blow.moment in OF_LAUNCHER else MOMENTS[blow.moment][0](run)
        if not arrive(blow.moment, run, seen, blow.later):
            report.problems.append(f"'{blow.moment}' did not come")
            continue
        report.blows.append(f"{blow.moment}, {blow.who}")
        ranks = ranks_of(run.process.pid)
        if blow.rank is not None and ranks:
            told = restarts_told(run)
            os.kill(ranks[blow.rank % len(ranks)], signal.SIGKILL)
            following = blows[number + 1].moment if number + 1 < len(blows) else ""
            if following != "restart":
                arrive("restart", run, told, 0.0)  # the next blow is for the ranks that are started then
            continue
        run.process.kill()
        run.process.wait()
        run = setting.start(layout, name, steps)  # at once: what is left of the first is in its way
        report.starts += 1
        if not all_gone(ranks):
            report.problems.append("ranks outlived their launcher")
    if run.process.wait(timeout=600) != 0:
        report.problems.append(f"exit code {run.process.returncode}: {run.output.read_text()[-2000:]}")
    report.starts += run.output.read_text().count("Starting again")
    report.problems += differences(run.folder, expected, steps)
    return report


def differences(folder: Path, expected: Path, steps: int) -> Iterator[str]:
    """What is not as in the unharmed run: weights, optimizer, the samples of each step; what is left over."""
    try:
        mine, theirs = (verified(folder_of(run, steps)) for run in (folder, expected))
        if mine.files != theirs.files:
            yield "the last checkpoint is not that of the unharmed run"
        logs = [
            [(each.first, each.digest) for each in read_samples(run, steps)] for run in (folder, expected)
        ]
        if logs[0] != logs[1]:
            yield "the samples are not those of the unharmed run"
    except (DamagedError, BadNews) as error:
        yield str(error)
    left = [path.name for path in folder.rglob("*") if ".partial" in path.name or path.name == "writer.lock"]
    if left:
        yield f"left over: {', '.join(left)}"


def plan(seed: int, kills: int, ranks: int, a_run: int) -> list[tuple[str, list[Blow]]]:
    """Runs and their blows: every moment in turn, from a random one on; layouts in turn."""
    draw = random.Random(seed)
    layouts = list(LAYOUTS) if ranks > 1 else ["one rank"]
    moments = [each for each in MOMENTS if ranks > 1 or each not in ("restart", "build and load")]
    order = [each for _ in range(kills // len(moments) + 1) for each in draw.sample(moments, len(moments))]
    found: list[tuple[str, list[Blow]]] = []
    for number, first in enumerate(range(0, kills, a_run)):
        chosen = order[first : min(first + a_run, kills)]
        # What comes before training comes first; a restart needs a rank that was killed before it.
        chosen.sort(key=lambda each: (each not in OF_LAUNCHER, each != "data build", each == "restart"))
        blows = list[Blow]()
        for moment in chosen:
            alone = ranks == 1 or moment in OF_LAUNCHER
            rank = None if alone or draw.random() < 0.4 else draw.randrange(ranks)
            blows.append(Blow(moment, rank, draw.random()))
        if "restart" in chosen:
            place = chosen.index("restart")
            before = blows[place - 1] if place else None
            if before is None or before.rank is None:
                fresh = Blow("some step", draw.randrange(ranks), draw.random())
                blows[max(0, place - 1) : place] = [fresh]
        found.append((layouts[number % len(layouts)], blows))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--kills-a-run", type=int, default=3)
    parser.add_argument("--only", type=int, help="the number of one run of the plan")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="fivefold-soak-") as home:
        setting = Setting(options.ranks, options.device, Path(home))
        print("seed | run | layout | kills | starts | result")
        runs = plan(options.seed, options.kills, options.ranks, options.kills_a_run)
        for number, (layout, blows) in enumerate(runs):
            if options.only in (None, number):
                report = harm(setting, layout, f"run-{number}", blows)
                failed |= bool(report.problems)
                result = "; ".join(report.problems) or "identical"
                kills = "; ".join(report.blows)
                print(
                    f"{options.seed} | {number} | {layout} | {kills} | {report.starts} | {result}", flush=True
                )
    sys.exit(failed)


if __name__ == "__main__":
    main()
