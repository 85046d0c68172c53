"""The doctor: reads a run's heartbeats, looks at its processes, says what is the matter. No torch here."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fivefold.problems import BadInput, Problem
from fivefold.watch.beat import FINISHED, Beat, read_beats, stack_of
from fivefold.watch.diagnosis import Diagnosis, busy_s, diagnose, has_stalled, stragglers
from fivefold.watch.processes import stack_now, state_of

REPORT = "doctor.json"
LATE_S = 3.0
"""A process that runs, and whose heartbeat is older: Python does not get to run in it."""


@dataclass(frozen=True)
class Report:
    """What the doctor found, with the beats that it is about."""

    diagnosis: Diagnosis
    beats: tuple[Beat, ...]

    @property
    def lines(self) -> list[str]:
        """The sentence, then the ranks that are slower than the others, then where to read on."""
        slow = [
            f"rank {rank} is slow: busy for {seconds:.3g} s of a step, {times:.1f} times the median"
            for rank, seconds, times in stragglers(self.beats)
        ]
        return [self.diagnosis.sentence, *slow]

    def told(self) -> dict[str, Any]:
        """For `--json` and for the run's folder."""
        ranks = [
            {"rank": beat.rank, "host": beat.host, "pid": beat.pid, "step": beat.step, "phase": beat.doing}
            | {"waits": beat.waits, "where": beat.where, "step_s": beat.step_s, "busy_s": busy_s(beat)}
            | {"collectives": {axis: group.count for axis, group in beat.groups.items()}}
            for beat in self.beats
        ]
        slow = [{"rank": rank, "busy_s": s, "times_median": t} for rank, s, t in stragglers(self.beats)]
        return {**asdict(self.diagnosis), "stragglers": slow, "heartbeats": ranks}


def check(run: Path) -> list[Problem]:
    """Why there is nothing to look at."""
    if not run.is_dir():
        return [Problem("RUN", f"'{run}' is not a folder", "Give the folder of a run, such as runs/tiny.")]
    if not (run / "job.toml").exists():
        hint = "A run's folder holds job.toml. Leave RUN out to look at the machine."
        return [Problem("RUN", f"'{run}' is not the folder of a run", hint)]
    return []


def examine(run: Path, stalled: bool = False) -> Report:
    """What is the matter with a run. Raises `BadInput` where there is none.

    stalled  it is known that no rank moves any more
    """
    if problems := check(run):
        raise BadInput(problems)
    beats = [_awake(run, beat) for beat in read_beats(run)]
    states = {beat.rank: state_of(beat) for beat in beats}
    return Report(diagnose(beats, states, time.time(), _errors(run, beats), stalled), tuple(beats))


def stalled(run: Path) -> Report | None:
    """A report when no rank of a run has moved for longer than it may."""
    return examine(run, stalled=True) if has_stalled(read_beats(run), time.time()) else None


def keep(run: Path, report: Report) -> None:
    """Leave a report in the run's folder."""
    with contextlib.suppress(OSError):  # a full disk must not hide what is the matter
        (run / REPORT).write_text(json.dumps(report.told(), indent=1) + "\n", encoding="utf-8")


def stacks(run: Path, report: Report) -> list[Path]:
    """The files with the stacks of the ranks that are named."""
    paths = [stack_of(run, rank) for rank in report.diagnosis.ranks]
    return [path for path in paths if path.exists() and path.stat().st_size]


def _awake(run: Path, beat: Beat) -> Beat:
    """A beat, with the place in the code of a process that cannot tell it any more."""
    if beat.phase == FINISHED or time.time() - beat.at < LATE_S or state_of(beat) != "runs":
        return beat
    return replace(beat, where=stack_now(run, beat) or beat.where, waits=False)


def _errors(run: Path, beats: Sequence[Beat]) -> dict[int, str]:
    """What ranks have said when they failed."""
    found = {}
    for beat in beats:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads((run / "errors" / f"rank-{beat.rank}.json").read_text(encoding="utf-8"))
            if float(told["time"]) >= beat.at - 60:
                found[beat.rank] = f"{told['type']}: {str(told['message']).splitlines()[0]}"
    return found
