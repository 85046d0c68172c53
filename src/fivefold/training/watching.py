"""How a run is watched: each rank's heartbeat, and what happens when no rank moves any more.

Ranks that fivefold started are watched by the process that started them. Others, and a lone one, watch
themselves: they leave, so that whoever started them can start them again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from fivefold.axes.runtime.mesh import Mesh
from fivefold.training.failures import RankFailure
from fivefold.watch.beat import FINISHED, read_beats
from fivefold.watch.diagnosis import Diagnosis
from fivefold.watch.doctor import LATE_S, Report, keep, stacks, stalled
from fivefold.watch.heartbeat import Heartbeat

if TYPE_CHECKING:
    from fivefold.comm.world import World
    from fivefold.config import Job

EVERYONE = "all ranks"
SPEAKING_S = 5.0
"""What ranks leave to the one that says what is the matter, before they end and take it along."""


def heartbeat(job: Job, world: World, folder: Path) -> Heartbeat:
    """The heartbeat of this rank; one that nobody watches from outside ends the process on a stall."""
    seconds = job.resilience.stall_s
    if world.launched == "own":
        return Heartbeat(folder, world.rank, world.size, seconds)
    return Heartbeat(folder, world.rank, world.size, seconds, lambda: _leave_if_stalled(folder, world.rank))


def groups_of(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """The process groups of a layout by axis, and that of all ranks if no axis has it."""
    if mesh.layout.ranks == 1:
        return {}
    found = {axis: group for axis in mesh.meshes if (group := mesh.group(axis)) is not None}
    everyone = dist.group.WORLD
    if everyone is None or everyone.group_name in {group.group_name for group in found.values()}:
        return found
    return {EVERYONE: everyone} | found


def watcher(folder: Path, ranks: int, join_s: float) -> Callable[[], RankFailure | None]:
    """Asked again and again whether ranks of this machine have stalled: says so, and who is to blame.

    join_s  how long ranks may take to start
    """
    began = time.monotonic()

    def look() -> RankFailure | None:
        beats = read_beats(folder)
        if len(beats) < ranks and time.monotonic() - began > join_s:
            came = {beat.rank for beat in beats}
            late = tuple(rank for rank in range(ranks) if rank not in came)
            words = (
                f"{len(late)} of {ranks} ranks have not started within {join_s:.0f} s, rank {late[0]} first"
            )
            return _failure(Report(Diagnosis(False, words, late, 0, "start"), tuple(beats)))
        report = stalled(folder)
        if report is None:
            return None
        _say_more(folder, report)
        return _failure(report)

    return look


def _failure(report: Report) -> RankFailure:
    rank = report.diagnosis.ranks[0] if report.diagnosis.ranks else 0
    return RankFailure(rank, time.time(), "Stalled", report.diagnosis.sentence, step=report.diagnosis.step)


def _say_more(folder: Path, report: Report) -> None:
    """What goes with the sentence: who is slow, where the stacks are, and all of it in the run's folder."""
    keep(folder, report)
    for line in report.lines[1:]:
        print(line, file=sys.stderr)
    for path in stacks(folder, report):
        print(f"its stacks: {path}", file=sys.stderr)


def _leave_if_stalled(folder: Path, rank: int) -> None:
    """End this process if no rank moves; the lowest one whose heart beats says why.

    No other may: when they look, it may have left, and then they would blame it.
    """
    report = stalled(folder)
    if report is None:
        return
    alive = [beat.rank for beat in report.beats if beat.phase != FINISHED and time.time() - beat.at < LATE_S]
    if rank == min(alive, default=rank):
        print(f"stalled: {report.diagnosis.sentence}", file=sys.stderr)
        _say_more(folder, report)
        with contextlib.suppress(OSError):
            _failure(report).write(folder / "errors")
    else:
        time.sleep(SPEAKING_S)
    sys.stderr.flush()
    os._exit(1)
