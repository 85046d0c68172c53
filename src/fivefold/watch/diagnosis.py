"""Who waits for whom, in one sentence: a function of the ranks' heartbeats and the state of their processes.

A rank waits for another if it has entered a collective of a group that the other has not. Whoever others wait
for, and who waits for nobody, holds them up. Where ranks wait for each other, one has left a collective out:
the one that is further on. Messages from rank to rank (a pipeline's) are not counted alike on both sides;
there it is told by who is inside a message and who is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fivefold.watch.beat import FINISHED, Beat
from fivefold.watch.processes import State

QUIET_S = 5.0
"""Seconds without a move from which on somebody may be waited for; steps that take long are given three."""
SETTLED_S = 3.0
"""Seconds without a move after which every rank that runs has told its place."""
SILENT_S = 30.0
"""Seconds without a heartbeat from which on a rank of another machine is taken for lost."""
UNEVEN = ("pp",)
"""Groups whose ranks send each other different numbers of messages."""
NAMED_RANKS = 8
LEAST_BUSY, MOSTLY_BUSY = 0.02, 0.5
"""Shares of a step: less was seen too seldom to be compared with; who holds up others is busy for more."""


@dataclass(frozen=True)
class Diagnosis:
    """What is the matter with a run.

    ok       nothing is
    ranks    who is named: whom the others wait for
    step, phase  where they are
    waiting_s    for how long no rank has moved
    """

    ok: bool
    sentence: str
    ranks: tuple[int, ...] = ()
    step: int | None = None
    phase: str | None = None
    waiting_s: float = 0.0


def has_stalled(beats: Sequence[Beat], now: float) -> bool:
    """Whether no rank has moved for longer than it may take."""
    running = [beat for beat in beats if beat.phase != FINISHED]
    return bool(running) and all(0 < beat.patience <= now - beat.moved for beat in running)


def diagnose(
    beats: Sequence[Beat],
    states: Mapping[int, State],
    now: float,
    errors: Mapping[int, str] | None = None,
    stalled: bool = False,
) -> Diagnosis:
    """What is the matter, from the heartbeats of the ranks that have any.

    states   what became of each rank's process
    errors   what ranks that failed have said, by rank
    stalled  whether it is known that no rank moves any more; otherwise it is so after `QUIET_S` seconds
    """
    if not beats:
        return Diagnosis(False, "no rank of this run has left a heartbeat: none has started yet")
    by_rank = {beat.rank: beat for beat in beats}
    running = [beat for beat in beats if beat.phase != FINISHED]
    step = max(beat.step for beat in beats)
    missing = sorted(set(range(beats[0].ranks)) - by_rank.keys())
    if not running and not missing:
        return Diagnosis(True, f"the run has ended, in step {step}", step=step, phase=FINISHED)
    gone = [beat for beat in running if states.get(beat.rank) == "gone"]
    if gone:
        return _ended(gone, running, now, errors or {})
    still = min(now - beat.moved for beat in running) if running else QUIET_S
    quiet = max([QUIET_S, *(3 * beat.step_s for beat in running if beat.step_s is not None)])
    stopped = [beat for beat in running if states.get(beat.rank) == "stopped"]
    lost = [beat for beat in running if states.get(beat.rank) == "elsewhere" and now - beat.at > SILENT_S]
    if missing and (stalled or still >= QUIET_S):
        rest = _rest(running, now)
        words = f"{_named(missing)} of {beats[0].ranks} never started: no heartbeat came{rest}"
        return Diagnosis(False, words, tuple(missing), step, "start", still)
    if stopped or lost:
        held = [_fate(beat, states[beat.rank], now) for beat in (stopped or lost)[:NAMED_RANKS]]
        return _holding(stopped or lost, running, "; ".join(held), now)
    if still < quiet and not stalled:
        return Diagnosis(True, _healthy(running, step), step=step, phase=running[0].phase)
    return _stalled(running, now, still)


def stragglers(beats: Sequence[Beat], factor: float = 1.5) -> list[tuple[int, float, float]]:
    """Ranks that are busy for at least `factor` times the median of all in a step: rank, seconds, times."""
    busy = {beat.rank: seconds for beat in beats if (seconds := busy_s(beat)) is not None}
    if len(busy) < 2:
        return []
    step_s = max(beat.step_s or 0.0 for beat in beats)
    median = max(sorted(busy.values())[(len(busy) - 1) // 2], LEAST_BUSY * step_s)
    slow = [(rank, seconds, seconds / median) for rank, seconds in busy.items() if median > 0]
    named = (each for each in slow if each[2] >= factor and each[1] >= MOSTLY_BUSY * step_s)
    return sorted(named, key=lambda each: -each[2])


def busy_s(beat: Beat) -> float | None:
    """Seconds of a step in which a rank does not wait for others."""
    return None if beat.step_s is None or beat.busy is None else beat.step_s * beat.busy


# --- who holds up whom -------------------------------------------------------------------------------------


def _stalled(running: Sequence[Beat], now: float, still: float) -> Diagnosis:
    """No rank moves, and all processes run."""
    edges = {beat.rank: _waited_for(beat, running) for beat in running}
    awaited = {rank for found in edges.values() for rank in found}
    sinks = [beat for beat in running if beat.rank in awaited and not edges[beat.rank]]
    busy = [beat for beat in running if not beat.waits]
    holding = [beat for beat in sinks if not beat.waits] or (busy if len(busy) < len(running) else sinks)
    if holding and len(holding) < len(running):
        return _holding(holding, running, "", now)
    if awaited and not sinks:
        return _circle([beat for beat in running if beat.rank in awaited], running, now, still)
    first = min(running, key=lambda beat: beat.place)
    each = f"each of {len(running)} ranks" if len(running) > 1 else "the rank"
    place = f" at {first.where}" if first.where else ""
    words = f"{each} is in {first.doing}{_of(first)} since {still:.0f} s{place}, and waits for no other"
    overdue = still >= first.patience > 0
    ranks = tuple(beat.rank for beat in running) if overdue else ()
    return Diagnosis(not overdue, words, ranks, first.step, first.phase, still)


def _waited_for(beat: Beat, running: Sequence[Beat]) -> set[int]:
    """Ranks that have not entered a collective that this one has."""
    return {other.rank for other in running for _ in _ahead(beat, other)}


def _ahead(beat: Beat, other: Beat) -> list[str]:
    """The groups of both in which `beat` has entered more collectives than `other`."""
    return [
        axis
        for axis, group in beat.groups.items()
        if axis not in UNEVEN
        and other.rank in group.ranks
        and axis in other.groups
        and other.groups[axis].ranks == group.ranks
        and other.groups[axis].count < group.count
    ]


def _holding(holding: Sequence[Beat], running: Sequence[Beat], fate: str, now: float) -> Diagnosis:
    """These ranks hold up the others."""
    others = [beat for beat in running if beat not in holding]
    still = min((now - beat.moved for beat in others), default=now - max(beat.moved for beat in holding))
    first = min(holding, key=lambda beat: beat.place)
    # The last word of a process that cannot speak is old by then, and that of the others too for a while.
    missed = _missed(first, others, latest=bool(fate)) if not fate or still >= SETTLED_S else None
    names = _named([beat.rank for beat in holding])
    step = max([first.step, *(beat.step for beat in others)]) if fate else first.step
    is_in = "it is in" if len(holding) == 1 else "they are in"
    place = f" at {first.where}" if first.where else ""
    doing = fate or f"{is_in} {first.doing}{place}"
    if missed:
        words = f"{names} never entered {missed[0]} of step {missed[1]}: {doing}"
        step = missed[1]
    elif fate:
        words = f"{names} of step {step} is not there: {doing}"
    else:
        words = f"{names} of step {step} keeps the others waiting: {doing} since {now - first.moved:.0f} s"
    return Diagnosis(
        False, words + _rest(others, now), tuple(b.rank for b in holding), step, first.phase, still
    )


def _circle(core: Sequence[Beat], running: Sequence[Beat], now: float, still: float) -> Diagnosis:
    """Ranks that wait for each other: one has left out a collective that others are in."""
    latest = max(beat.place for beat in core)
    ahead = [beat for beat in core if beat.place == latest]
    first = ahead[0]
    others = [beat for beat in running if beat is not first]
    missed = _missed(first, others)
    axis = next(axis for other in others for axis in _ahead(first, other))
    entered = _collective(axis, first.groups[axis].count, [first])
    if len(ahead) == 1 and missed:
        words = (
            f"rank {first.rank} never entered {missed[0]} of step {missed[1]}: it left it out, and is in "
            f"{first.doing}{_of(first)}, in {entered}{_rest(others, now)}"
        )
        return Diagnosis(False, words, (first.rank,), missed[1], first.phase, still)
    also = f", and {_named([first.rank])} not {missed[0]}" if missed else ""
    words = (
        f"{_named([beat.rank for beat in core])} wait for each other in step {first.step} ({first.doing}) "
        f"since {still:.0f} s: {_named([b.rank for b in others if axis in _ahead(first, b)])} never entered "
        f"{entered}{also}. One of them has left a collective out"
    )
    return Diagnosis(False, words, tuple(beat.rank for beat in core), first.step, first.phase, still)


def _missed(beat: Beat, others: Sequence[Beat], latest: bool = False) -> tuple[str, int] | None:
    """The first collective that a rank has not entered though others have, in words, and their step.

    latest  the one that the others are in, where the rank may have entered more than it told
    """
    found = [(other, axis) for other in others for axis in _ahead(other, beat)]
    if not found:
        return None
    other, axis = min(found, key=lambda each: (each[0].groups[each[1]].count, each[0].rank))
    number = other.groups[axis].count if latest else beat.groups[axis].count + 1
    return _collective(axis, number, others), other.step


def _collective(axis: str, number: int, entered: Sequence[Beat]) -> str:
    """`all-reduce #412 (tp)`"""
    names = [beat.groups[axis].names.get(number) for beat in entered if axis in beat.groups]
    return f"{next(filter(None, names), 'collective')} #{number} ({axis})"


# --- words -------------------------------------------------------------------------------------------------


def _ended(gone: Sequence[Beat], running: Sequence[Beat], now: float, errors: Mapping[int, str]) -> Diagnosis:
    first = min(gone, key=lambda beat: (beat.rank not in errors, beat.at))
    why = f": {errors[first.rank]}" if first.rank in errors else ""
    ranks = tuple(beat.rank for beat in gone)
    when = f"{now - first.at:.0f} s ago"
    if len(gone) == len(running):
        words = f"no process of this run is left: it was in {first.doing}{_of(first)} {when}{why}"
    else:
        words = (
            f"{_named(ranks)} ended in step {first.step} {when}, in {first.doing} (process {first.pid} on "
            f"{first.host}){why}{_rest([beat for beat in running if beat not in gone], now)}"
        )
    return Diagnosis(False, words, ranks, first.step, first.phase, now - first.at)


def _fate(beat: Beat, state: State, now: float) -> str:
    if state == "stopped":
        process = f"process {beat.pid} on {beat.host}"
        return f"its {process} is stopped (kill -CONT {beat.pid} lets it go on), in {beat.doing}"
    return f"nothing was heard of it on {beat.host} since {now - beat.at:.0f} s, when it was in {beat.doing}"


def _healthy(running: Sequence[Beat], step: int) -> str:
    times = [beat.step_s for beat in running if beat.step_s is not None]
    pace = f", {max(times):.3g} s a step" if times else ""
    ranks = f"{len(running)} ranks train" if len(running) > 1 else "1 rank trains"
    return f"{ranks}: step {step}, {min(running, key=lambda beat: beat.place).doing}{pace}"


def _rest(others: Sequence[Beat], now: float) -> str:
    if not others:
        return ""
    who = "the others wait" if len(others) > 1 else f"rank {others[0].rank} waits"
    return f"; {who} since {max(0.0, min(now - beat.moved for beat in others)):.0f} s"


def _of(beat: Beat) -> str:
    return f" of step {beat.step}" if beat.step else ""


def _named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 3 and 5`; of many the first."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:NAMED_RANKS]]
    if len(ranks) > NAMED_RANKS:
        return f"ranks {', '.join(shown)} and {len(ranks) - NAMED_RANKS} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
