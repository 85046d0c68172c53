"""A timeline as text for a terminal, and as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fivefold.planner.play.timeline import Event
from fivefold.problems import BadInput, Problem
from fivefold.report.shown import LOOKS, Shown

RESET = "\033[0m"
IDLE = "·"

Line = dict[str, Any]


def as_text(shown: Shown, width: int, colours: bool = False) -> str:
    """A line for each row: letters with the micro-batch's number where there is room, dots for waiting."""
    longest = max(map(len, shown.rows))
    columns = max(width - longest - 3, 10)
    scale = columns / (shown.end - shown.start)
    return "\n".join(
        f"{name:>{longest}} ▕{_drawn(shown, row, scale, columns, colours)}▏"
        for name, row in shown.rows.items()
    )


def _drawn(shown: Shown, row: Sequence[Event], scale: float, columns: int, colours: bool) -> str:
    parts, at = [], 0
    for event in row:
        start = max(round((event.start - shown.start) * scale), at)
        end = min(round((event.end - shown.start) * scale), columns)
        if end <= start:
            continue  # narrower than a character
        parts.append(IDLE * (start - at))
        cell = _cell(shown, event, end - start)
        parts.append(f"{LOOKS[event.kind].terminal}{cell}{RESET}" if colours else cell)
        at = end
    return "".join(parts) + IDLE * (columns - at)


def _cell(shown: Shown, event: Event, width: int) -> str:
    letter = LOOKS[event.kind].letter
    label = letter + shown.number(event)
    return (label if len(label) <= width else letter).ljust(width, "─")


def write_trace(shown: Shown, path: str) -> None:
    """Write the trace to a file. Raises `BadInput` where that is not possible."""
    try:
        Path(path).write_text(json.dumps(as_trace(shown)), encoding="utf-8")
    except OSError as error:
        raise BadInput([Problem("--trace", f"cannot write {path}: {error.strerror}")]) from None


def as_trace(shown: Shown) -> Line:
    """Chrome's trace format: a track for each row, arrows for transfers, counters for what is kept."""
    return {"traceEvents": [*_tracks(shown), *_slices(shown), *_arrows(shown), *_counters(shown)]}


def _tracks(shown: Shown) -> Iterator[Line]:
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": shown.title}}
    for track, name in enumerate(shown.rows):
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": track, "args": {"sort_index": track}}


def _slices(shown: Shown) -> Iterator[Line]:
    for track, row in enumerate(shown.rows.values()):
        for event in row:
            yield {
                "ph": "X",
                "name": LOOKS[event.kind].letter + shown.number(event),
                "cat": event.kind,
                "pid": 0,
                "tid": track,
                "ts": event.start * shown.microseconds,
                "dur": (event.end - event.start) * shown.microseconds,
                "args": {"kind": event.kind, "stage": event.stage, "micro-batch": event.micro_batch},
            }


def _arrows(shown: Shown) -> Iterator[Line]:
    """From each computation to the one on another rank that takes its result."""
    makers = {
        (event.kind == "forward", event.stage, event.micro_batch): (track, event)
        for track, row in enumerate(shown.rows.values())
        for event in row
        if event.kind in ("forward", "backward", "backward-input")
    }
    for number, ((forward, stage, micro_batch), (track, event)) in enumerate(makers.items()):
        taker = makers.get((forward, stage + 1 if forward else stage - 1, micro_batch))
        if taker is None or taker[0] == track:
            continue
        common = {
            "name": "activations" if forward else "gradients",
            "cat": "transfer",
            "pid": 0,
            "id": number,
        }
        yield {**common, "ph": "s", "tid": track, "ts": event.end * shown.microseconds}
        start = taker[1].start * shown.microseconds
        yield {**common, "ph": "f", "bp": "e", "tid": taker[0], "ts": start}


def _counters(shown: Shown) -> Iterator[Line]:
    for name, curve in shown.curves.items():
        for moment, level in curve:
            yield {
                "ph": "C",
                "name": f"{name}: {shown.kept}",
                "pid": 0,
                "ts": moment * shown.microseconds,
                "args": {shown.kept: round(level, 4)},
            }
