"""Intervals that overlap, added up so that no time counts twice. No torch.

All times are whole nanoseconds, so sums are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fivefold.watch.kinds import KINDS

Window = tuple[int, int]
"""From when to when; those of a list do not overlap, and are in the order of time."""


class Span(NamedTuple):
    """Something that runs, by what it is for and by name."""

    start: int
    end: int
    kind: str
    name: str


class Stretch(NamedTuple):
    """Time that counts as one kind's."""

    start: int
    end: int
    kind: str

    @property
    def length(self) -> int:
        return self.end - self.start


def clipped(spans: Iterable[Span], windows: Sequence[Window]) -> list[Span]:
    """What of the spans lies inside the windows."""
    found = []
    for span in spans:
        for start, end in windows:
            if max(start, span.start) < min(end, span.end):
                found.append(span._replace(start=max(start, span.start), end=min(end, span.end)))
    return found


def swept(spans: Iterable[Span], windows: Sequence[Window]) -> list[Stretch]:
    """The windows, cut into stretches of one kind each: without a gap, and without overlap.

    Where several spans run at once the time is that of the first kind in the order of `KINDS`; where none
    runs it is idle.
    """
    edges: list[tuple[int, int, str]] = []
    for span in clipped(spans, windows):
        edges += [(span.start, 1, span.kind), (span.end, -1, span.kind)]
    edges.sort()
    running: Counter[str] = Counter()
    found: list[Stretch] = []
    at = 0
    for start, end in windows:
        now = start
        while at < len(edges) and edges[at][0] <= end:
            moment, change, kind = edges[at]
            if moment == end and change > 0:
                break  # it begins in a window that follows without a gap
            _add(found, now, moment, _leading(running))
            now, at = moment, at + 1
            running[kind] += change
        _add(found, now, end, _leading(running))
    return found


def _leading(running: Counter[str]) -> str:
    return next((kind for kind in KINDS if running[kind] > 0), "idle")


def _add(found: list[Stretch], start: int, end: int, kind: str) -> None:
    if start == end:
        return
    if found and found[-1].end == start and found[-1].kind == kind:
        found[-1] = found[-1]._replace(end=end)
    else:
        found.append(Stretch(start, end, kind))


def by_kind(stretches: Iterable[Stretch]) -> dict[str, int]:
    """Nanoseconds of each kind, in the order of `KINDS`."""
    total = dict.fromkeys(KINDS, 0)
    for stretch in stretches:
        total[stretch.kind] += stretch.length
    return total
