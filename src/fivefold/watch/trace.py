"""A trace of torch's profiler, in Chrome's format: steps, phases, and what ran in them. No torch.

On a GPU what runs are its kernels. The kind of one is known by the phase and by the operator that started it,
and by its name. Without a GPU the operators themselves are what runs: each has the time that it does not
spend in another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fivefold.watch.kinds import in_phase, kernel_kind, operator_kind, whole_kind
from fivefold.watch.swept import Span, Window

OURS = "fivefold: "
"""What the names of a recorded run's own ranges begin with: `fivefold: step 10`, `fivefold: optimizer`."""
STEP = f"{OURS}step "
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
OUTSIDE = "gloo:"
"""Gloo's own marks: of messages, on threads beside, which do not end before the operator that sends them."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Recorded:
    """What a trace says.

    steps    numbers of the steps that were recorded, and `windows` from when to when each was
    spans    what ran, on any stream or thread
    source   what they are
    """

    steps: tuple[int, ...]
    windows: tuple[Window, ...]
    spans: tuple[Span, ...]
    source: Literal["kernels", "operators"]


def read(trace: Mapping[str, Any]) -> Recorded:
    """What a trace says of the steps in it, which may be none."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = [e for e in events if e["cat"] == "user_annotation" and e["name"].startswith(OURS)]
    steps = sorted((*_window(e), int(e["name"][len(STEP) :])) for e in ranges if e["name"].startswith(STEP))
    before = [0, *(end for _, end, _ in steps)]
    phases = _Line((*_window(e), e["name"][len(OURS) :]) for e in ranges if not e["name"].startswith(STEP))
    device = [event for event in events if event["cat"] in ON_DEVICE]
    kernels = any(event["cat"] == "kernel" for event in device)
    operators = _operators(events)
    return Recorded(
        steps=tuple(step for _, _, step in steps),
        windows=tuple((max(start, last), end) for (start, end, _), last in zip(steps, before, strict=False)),
        spans=tuple(
            _kernels(events, device, operators, phases) if kernels else _run(events, operators, phases)
        ),
        source="kernels" if kernels else "operators",
    )


def _window(event: Event) -> Window:
    """From when to when, in whole nanoseconds: traces have microseconds, with three places."""
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


class _Line:
    """What is said of moments by intervals that do not overlap."""

    def __init__(self, intervals: Iterable[tuple[int, int, Any]]):
        self._intervals = sorted(intervals, key=lambda each: each[:2])
        self._starts = [start for start, _, _ in self._intervals]

    def at(self, moment: int) -> Any:
        """None where nothing is said."""
        found = bisect_right(self._starts, moment) - 1
        return self._intervals[found][2] if found >= 0 and moment < self._intervals[found][1] else None


class _Doing(NamedTuple):
    """An operator that runs, and what its time counts as.

    whole  what runs inside is of its kind too
    """

    end: int
    kind: str | None
    name: str
    whole: bool


def _operators(events: Iterable[Event]) -> dict[Any, list[Span]]:
    """Thread -> which operator it was in, the innermost that is known, in the order of time."""
    threads: dict[Any, list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if event["cat"] == "cpu_op" and not event["name"].startswith(OUTSIDE):
            start, end = _window(event)
            threads[event["tid"]].append((start, -end, event["name"]))
    return {thread: _innermost(sorted(ran)) for thread, ran in threads.items()}


def _innermost(ran: Sequence[tuple[int, int, str]]) -> list[Span]:
    """One thread's operators, cut where another begins or ends inside."""
    found: list[Span] = []
    stack: list[_Doing] = []
    now = 0

    def until(moment: int) -> None:
        nonlocal now
        while stack and stack[-1].end <= moment:
            last = stack.pop()
            add(last, last.end)
        if stack:
            add(stack[-1], moment)
        now = max(now, moment)

    def add(doing: _Doing, end: int) -> None:
        nonlocal now
        if end > now:
            found.append(Span(now, end, doing.kind or "other", doing.name))
            now = end

    for start, minus_end, name in ran:
        until(start)
        around = stack[-1] if stack else None
        end = -minus_end if around is None else min(-minus_end, around.end)
        stack.append(_doing(name, end, around))
    until(max((doing.end for doing in stack), default=now))
    return found


def _doing(name: str, end: int, around: _Doing | None) -> _Doing:
    kind, whole = operator_kind(name), whole_kind(name)
    if kind == "messages":
        return _Doing(end, kind, name, whole=True)
    if around is not None and around.whole:
        return around._replace(end=end)
    if whole is not None:
        return _Doing(end, whole, name, whole=True)
    if kind is None and around is not None and around.kind not in (None, "idle"):
        return around._replace(end=end)
    return _Doing(end, kind, name, whole=False)


def _run(events: Iterable[Event], operators: Mapping[Any, list[Span]], phases: _Line) -> Iterable[Span]:
    """Without a GPU: operators, and the messages that Gloo sends beside them."""
    for spans in operators.values():
        for span in spans:
            yield span._replace(kind=in_phase(span.kind, phases.at(span.start)))
    for event in events:
        if event["name"].startswith(OUTSIDE):
            yield Span(*_window(event), "messages", event["name"])


def _kernels(
    events: Iterable[Event], device: Iterable[Event], operators: Mapping[Any, list[Span]], phases: _Line
) -> Iterable[Span]:
    """On a GPU: kernels and copies, by when and by what they were started."""
    launches = {
        event["args"]["correlation"]: (event["tid"], round(event["ts"] * 1000))
        for event in events
        if event["cat"] in LAUNCHES and "correlation" in event.get("args", {})
    }
    lines = {
        thread: _Line((span.start, span.end, span) for span in spans) for thread, spans in operators.items()
    }
    for event in device:
        start, end = _window(event)
        thread, started = launches.get(event.get("args", {}).get("correlation"), (None, start))
        inside = lines[thread].at(started) if thread in lines else None
        kind = _kind_on_device(event, inside)
        yield Span(start, end, in_phase(kind, phases.at(started)), event["name"])


def _kind_on_device(event: Event, inside: Span | None) -> str:
    """By a kernel's name, or else by the operator that started it; but all of an attention is attention."""
    if event["cat"] != "kernel":
        return "copies"
    named = kernel_kind(event["name"])
    if named == "messages":
        return named
    if inside is not None and inside.kind != "messages":
        whole = inside.kind == "attention" or (inside.kind == "loss" and named == "norms")
        if whole or (named is None and inside.kind != "idle"):
            return inside.kind
    return named or "other"
