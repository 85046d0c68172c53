"""Draws pipeline.svg: what four ranks do when, under four schedules. Made from the lists that really run.

    python docs/pictures/pipeline.py

A forward through a rank's layers takes one unit of time, each half of its backward too; messages take none.
Where a rank holds two stages, each of them takes half of that.
"""

from __future__ import annotations

from typing import NamedTuple

from drawing import AMBER, BLUE, GREEN, GREY, LINE, PALE, box, save, text

from fivefold.schedules import Action, schedule_named

RANKS, MICRO_BATCHES = 4, 8
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2))
COLOURS = {"forward": BLUE, "backward": AMBER, "backward-input": AMBER, "backward-weight": GREEN}
UNIT, ROW, LEFT, TOP, BLOCK = 24, 24, 186, 86, 132
WIDTH, HEIGHT = LEFT + 33 * UNIT + 24, TOP + len(SCHEDULES) * BLOCK - 2


class Done(NamedTuple):
    """One computation of a rank, and when it began and ended."""

    action: Action
    start: float
    end: float


def played(rows: list[list[Action]], stages: int) -> list[list[Done]]:
    """Each rank does its list in order, waiting where what it needs has not been computed yet."""
    ended: dict[tuple[str, int, int], float] = {}
    done: list[list[Done]] = [[] for _ in rows]
    left = [[action for action in row if action.kind in COLOURS] for row in rows]
    per_rank = stages // len(rows)
    while any(left):
        for row, mine in zip(left, done, strict=True):
            while row:
                kind, stage, number = row[0]
                needed = _needed(row[0], stages)
                if needed is not None and needed not in ended:
                    break
                start = max(mine[-1].end if mine else 0.0, ended[needed] if needed else 0.0)
                end = start + (2 if kind == "backward" else 1) / per_rank
                mine.append(Done(row.pop(0), start, end))
                if kind != "backward-weight":
                    ended["forward" if kind == "forward" else "backward", stage, number] = end
    return done


def _needed(action: Action, stages: int) -> tuple[str, int, int] | None:
    """What another stage must have computed before this can start."""
    kind, stage, number = action
    if kind == "forward":
        return ("forward", stage - 1, number) if stage else None
    if kind == "backward-weight":
        return None
    return ("backward", stage + 1, number) if stage < stages - 1 else ("forward", stage, number)


def most_kept(row: list[Done], per_rank: int) -> float:
    """The most micro-batches whose activations a rank keeps at once, in units of all its layers."""
    kept = most = 0
    for done in row:
        kept += {"forward": 1, "backward": -1, "backward-weight": -1}.get(done.action.kind, 0)
        most = max(most, kept)
    return most / per_rank


def timeline(schedule: str, per_rank: int, y: float) -> list[str]:
    stages = RANKS * per_rank
    rows = played(schedule_named(schedule).actions(RANKS, MICRO_BATCHES, per_rank), stages)
    length = max(row[-1].end for row in rows)
    idle = 1 - sum(done.end - done.start for row in rows for done in row) / (RANKS * length)
    kept = ", ".join(f"{most_kept(row, per_rank):g}" for row in rows)
    drawn = [
        text(20, y + 16, schedule, 15, bold=True),
        text(20, y + 36, f"{length:g} units of time", 12),
        text(20, y + 53, f"{idle:.0%} of it idle", 12),
        text(20, y + 76, "micro-batches kept:", 12, colour=GREY),
        text(20, y + 91, kept, 12, colour=GREY),
    ]
    for rank, row in enumerate(rows):
        top = y + rank * (ROW + 3)
        drawn.append(text(LEFT - 5, top + 16, str(rank), 11, "end", colour=GREY))
        drawn.append(box(LEFT, top, length * UNIT, ROW, "#eef0f2"))
        for done in row:
            colour = COLOURS[done.action.kind]
            first = done.action.stage < RANKS
            fill, ink = (colour, "#ffffff") if first else (PALE[colour], "#1f2328")
            x, width = LEFT + done.start * UNIT, (done.end - done.start) * UNIT
            drawn.append(box(x, top, width, ROW, fill, "#ffffff" if first else colour))
            drawn.append(
                text(x + width / 2, top + 16, str(done.action.micro_batch), 11, "middle", colour=ink)
            )
    return drawn


def legend() -> list[str]:
    drawn = []
    entries = (
        (BLUE, BLUE, "forward"),
        (AMBER, AMBER, "backward (in zbv: of inputs)"),
        (GREEN, GREEN, "backward of weights"),
        (PALE[BLUE], BLUE, "a rank's second stage"),
        ("#eef0f2", LINE, "idle"),
    )
    x = 20.0
    for fill, edge, words in entries:
        drawn += [box(x, 18, 18, 18, fill, edge), text(x + 26, 32, words)]
        x += 56 + 6.9 * len(words)
    words = "A row is a rank, time goes to the right, a box's number is its micro-batch."
    return [*drawn, text(20, 62, f"{words} 4 ranks, 8 micro-batches, the same work in all four.")]


if __name__ == "__main__":
    drawn = legend()
    for number, (schedule, per_rank) in enumerate(SCHEDULES):
        drawn += timeline(schedule, per_rank, TOP + number * BLOCK)
    save(__file__, "Four pipeline schedules on four ranks", WIDTH, HEIGHT, drawn)
