"""What became of the bugs, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from tests.mutants.plant import Outcome
from tests.mutants.table import Mutant

ENOUGH = 0.95
Known = Mapping[str, Outcome | None]
"""By the bug's name; None where it was not tried."""


def is_enough(chosen: Sequence[Mutant], known: Known) -> bool:
    """Whether nearly all were caught, and every survivor has its reason in the table."""
    caught = [mutant for mutant in chosen if _verdict(mutant, known) == "caught"]
    explained = all(
        mutant in caught or (_verdict(mutant, known) == "survived" and mutant.survives) for mutant in chosen
    )
    return explained and len(caught) >= ENOUGH * len(chosen)


def report(chosen: Sequence[Mutant], known: Known) -> str:
    """A line a room, then whatever was not caught and why."""
    by_room: dict[str, list[str]] = defaultdict(list)
    for mutant in chosen:
        by_room[mutant.room].append(_verdict(mutant, known))
    everything = [verdict for verdicts in by_room.values() for verdict in verdicts]
    lines = [f"{'room':14} planted  caught"]
    lines += [_row(room, verdicts) for room, verdicts in by_room.items()]
    lines.append(f"{_row('all', everything)}  ({everything.count('caught') / len(everything):.1%})")
    for mutant in chosen:
        if (verdict := _verdict(mutant, known)) != "caught":
            lines += ["", f"{verdict}: {mutant.name} ({mutant.path})", *_why(mutant, known[mutant.name])]
    return "\n".join(lines)


def _verdict(mutant: Mutant, known: Known) -> str:
    outcome = known[mutant.name]
    return "not tried" if outcome is None else outcome.verdict


def _row(name: str, verdicts: Sequence[str]) -> str:
    return f"{name:14} {len(verdicts):7} {verdicts.count('caught'):7}"


def _why(mutant: Mutant, outcome: Outcome | None) -> list[str]:
    if outcome is None:
        return []
    if outcome.verdict == "invalid":
        return [f"  it could not be tried: {line}" for line in outcome.said.splitlines()[-3:]]
    tests = ", ".join(mutant.tests)
    return [f"  {mutant.survives or f'no reason is known: it passes {tests}'}"]
