"""What a rank tells about itself: a small file in the run's folder, `heartbeats/rank-00003`. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "heartbeats"
LOADING, FINISHED = "data loading", "finished"
PHASES = (
    "start",
    "build",
    LOADING,
    "forward and backward",
    "gradient reduction",
    "loss and norm",
    "optimizer",
    "outer step",
    "validation",
    "checkpoint",
    "profile",
    FINISHED,
)
"""The phases of a rank's life, in the order of a step."""
END = b"\nend\n"


@dataclass(frozen=True)
class Group:
    """Ranks that share collectives, and how far this one is in them.

    count  how many collectives of the group this rank has entered
    names  what the last of them are, by number; filled in when the rank stands still
    """

    ranks: tuple[int, ...]
    count: int
    names: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Beat:
    """One rank at one moment; times are in seconds since the epoch.

    born      when the process started, in ticks since the machine did: a later one may have its number
    part      of the phase: the number of a micro-batch or a validation batch; 0 where there is none
    moved     when step, phase, part or a count of collectives last changed
    at        when this was written
    patience  seconds without a move after which the rank has stalled
    waits     whether the rank waits for others, inside a collective
    where     the place in the code, when the rank stands still
    step_s    seconds of a step, lately; None before the second
    busy      the share of its time, lately, in which the rank did not wait for others
    groups    by axis
    """

    rank: int
    ranks: int
    host: str
    pid: int
    born: int
    step: int
    phase: str
    part: int
    moved: float
    at: float
    patience: float
    waits: bool = False
    where: str = ""
    step_s: float | None = None
    busy: float | None = None
    groups: Mapping[str, Group] = field(default_factory=dict)

    @property
    def doing(self) -> str:
        """The phase in words."""
        unit = {"forward and backward": "micro-batch", "validation": "batch"}.get(self.phase)
        return f"{self.phase} (of {unit} {self.part})" if unit and self.part else self.phase

    @property
    def place(self) -> tuple[int, int, int]:
        """How far the rank is: greater is later."""
        return self.step, PHASES.index(self.phase), self.part


def path_of(run: Path, rank: int) -> Path:
    return run / FOLDER / f"rank-{rank:05d}"


def stack_of(run: Path, rank: int) -> Path:
    """Where a rank leaves the stacks of its threads."""
    return run / FOLDER / f"rank-{rank:05d}.stack"


def clear(run: Path) -> None:
    """Remove what the ranks of an earlier attempt have left."""
    for path in (run / FOLDER).glob("rank-*"):
        path.unlink(missing_ok=True)


def written(beat: Beat) -> bytes:
    """A beat as bytes: one line, and a second that ends it, for who reads while it is written."""
    told = asdict(beat)
    for name, group in beat.groups.items():
        told["groups"][name]["ranks"] = _shortened(group.ranks)
    return json.dumps(told).encode() + END


def read_beat(path: Path) -> Beat | None:
    """The beat in a file; None where there is none that can be read."""
    try:
        text, end, _ = path.read_text(encoding="utf-8").partition(END.decode())
        told = json.loads(text) if end else None
        return _beat(told) if isinstance(told, dict) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_beats(run: Path) -> list[Beat]:
    """The beats of a run's ranks, those of one start, by rank."""
    paths = sorted(path for path in (run / FOLDER).glob("rank-*") if not path.suffix)
    beats = [beat for path in paths if (beat := read_beat(path) or read_beat(path)) is not None]
    return [beat for beat in beats if beat.rank < beats[0].ranks]


def write_at(handle: int, beat: Beat) -> None:
    """Put a beat in the place of the one before, in one write."""
    os.pwrite(handle, written(beat), 0)


def _beat(told: dict[str, Any]) -> Beat:
    groups = {
        axis: Group(
            _all(group["ranks"]),
            int(group["count"]),
            {int(number): str(name) for number, name in group["names"].items()},
        )
        for axis, group in told.pop("groups").items()
    }
    beat = Beat(**told, groups=groups)
    if beat.phase not in PHASES:
        raise ValueError(beat.phase)
    return beat


def _shortened(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    """Ranks at equal distances by the first, how many and the distance: thousands would be in every beat."""
    first, step = ranks[0], ranks[1] - ranks[0] if len(ranks) > 1 else 1
    regular = all(rank == first + step * number for number, rank in enumerate(ranks))
    return {"first": first, "ranks": len(ranks), "step": step} if regular else list(ranks)


def _all(told: list[int] | dict[str, int]) -> tuple[int, ...]:
    if isinstance(told, dict):
        return tuple(told["first"] + told["step"] * number for number in range(told["ranks"]))
    return tuple(told)
