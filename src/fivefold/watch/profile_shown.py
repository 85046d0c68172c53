"""A profile as a person sees it: cells of a table, sentences below it, rows in the trace itself. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivefold.watch.kinds import KINDS
from fivefold.watch.profile import Profile, Promise

LONGEST, WIDE = 3, 56
"""Of so many kernels the names are shown, cut to so many characters."""
PROCESS = 1_000_000_001
"""The number of the process under which a trace has our rows: no process of an operating system has it."""
MEASURED, PROMISED = 1, 2


def title(profile: Profile) -> str:
    """What was recorded, and where."""
    first, last = profile.recorded.steps[0], profile.recorded.steps[-1]
    steps = f"steps {first} to {last}" if last > first else f"step {first}"
    of = f"rank {profile.rank} of {profile.ranks}, " if profile.ranks > 1 else ""
    return f"profile of {steps}: {of}{profile.device}"


def header(profile: Profile) -> Sequence[str]:
    return ("", "ms a step", "share", *(("promised", "measured / promised") if profile.promised else ()))


def rows(profile: Profile) -> list[Sequence[str]]:
    """One for each kind that there is, and one for the step."""
    kinds = [kind for kind in KINDS if profile.nanoseconds[kind] or profile.promised.get(kind)]
    found = [_row(profile, KINDS[kind], profile.seconds(kind), profile.promised.get(kind)) for kind in kinds]
    return [*found, _row(profile, "step", profile.step_s, sum(profile.promised.values()))]


def _row(profile: Profile, told: str, seconds: float, promised: float | None) -> Sequence[str]:
    cells = (told, ms(seconds), f"{seconds / profile.step_s:.1%}")
    if not profile.promised:
        return cells
    if not promised:
        return (*cells, "", "")
    return (*cells, ms(promised), f"{seconds / promised:.2f}")


def remarks(profile: Profile) -> list[str]:
    """What took longest, what the figures are, and whose promise it is."""
    kernels = profile.recorded.source == "kernels"
    found = [f"longest {profile.recorded.source}, in ms a step:"]
    for one in profile.biggest[:LONGEST]:
        name = one.name if len(one.name) <= WIDE else f"{one.name[: WIDE - 3]}..."
        found.append(f"{ms(one.seconds):>9}  {one.kind}: {name}")
    if profile.seconds("messages") or profile.hidden_s:
        found.append(f"messages that nothing hides; behind compute run {ms(profile.hidden_s)} ms more")
    found.append(f"idle: no {'kernel' if kernels else 'operator'} runs")
    promise = profile.promise
    found.append(f"promised: {promise.of}" if isinstance(promise, Promise) else f"no promise: {promise}")
    return found


def ms(seconds: float) -> str:
    """Milliseconds: `12,340`, `512.3`, `0.02`."""
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 999.95 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def rows_in_trace(profile: Profile) -> list[dict[str, Any]]:
    """Events of two rows: what the time counts as, and below the first step what was promised of one."""
    found = [
        _named("process_name", 0, name="where the time went"),
        _named("process_sort_index", 0, sort_index=-1),
    ]
    found.append(_named("thread_name", MEASURED, name="measured"))
    found += [_event(each.kind, MEASURED, each.start, each.length) for each in profile.stretches]
    if profile.promised:
        found.append(_named("thread_name", PROMISED, name="promised"))
        start = profile.recorded.windows[0][0]
        for kind, seconds in profile.promised.items():
            found.append(_event(kind, PROMISED, start, round(seconds * 1e9)))
            start += round(seconds * 1e9)
    return found


def _named(what: str, row: int, **value: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": row, "ts": 0, "args": value}


def _event(kind: str, row: int, start: int, length: int) -> dict[str, Any]:
    """Of whole nanoseconds; traces have microseconds."""
    times = {"ts": start / 1000, "dur": length / 1000}
    return {"ph": "X", "cat": "kind", "name": KINDS[kind], "pid": PROCESS, "tid": row, **times}
