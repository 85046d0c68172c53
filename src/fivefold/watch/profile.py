"""Where the time of some recorded steps went, by kind, beside what was promised. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fivefold.watch.kinds import KINDS
from fivefold.watch.swept import Stretch, by_kind, clipped, swept
from fivefold.watch.trace import Recorded

FOLDER, SUMMARY = "profile", "summary.json"
NAMED = 5
"""Of each kind so many names are kept, those with the most time; of what is not known all."""


class Biggest(NamedTuple):
    """All that ran under one name: seconds a step, and in how many pieces."""

    name: str
    kind: str
    seconds: float
    pieces: float


@dataclass(frozen=True)
class Promise:
    """What the planner says of one step.

    of       whose step: which rank's, on which cluster
    kinds    kind -> seconds; their sum is the step
    """

    of: str
    kinds: Mapping[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Profile:
    """Where the time of some steps of one rank went.

    rank     whose, and of how many ranks
    promise  what was promised; or in words why nothing was
    versions of the software that ran
    """

    recorded: Recorded
    rank: int
    ranks: int
    device: str
    promise: Promise | str
    versions: Mapping[str, str]

    @cached_property
    def stretches(self) -> list[Stretch]:
        """The steps, cut into stretches of one kind each."""
        return swept(self.recorded.spans, self.recorded.windows)

    @cached_property
    def nanoseconds(self) -> dict[str, int]:
        """Of each kind, in all steps: exactly as many as the steps took."""
        return by_kind(self.stretches)

    @property
    def step_s(self) -> float:
        return self._each(sum(end - start for start, end in self.recorded.windows))

    def seconds(self, kind: str) -> float:
        """A step, on average."""
        return self._each(self.nanoseconds[kind])

    @cached_property
    def hidden_s(self) -> float:
        """Seconds a step in which messages ran while something was computed."""
        messages = [span for span in self.recorded.spans if span.kind == "messages"]
        ran = by_kind(swept(messages, self.recorded.windows))["messages"]
        return self._each(ran - self.nanoseconds["messages"])

    @cached_property
    def biggest(self) -> list[Biggest]:
        """By name, the longest first; what overlaps counts for each."""
        took: dict[tuple[str, str], int] = defaultdict(int)
        pieces: Counter[tuple[str, str]] = Counter()
        for span in clipped(self.recorded.spans, self.recorded.windows):
            took[span.kind, span.name] += span.end - span.start
            pieces[span.kind, span.name] += 1
        steps = len(self.recorded.steps)
        return [
            Biggest(name, kind, self._each(total), pieces[kind, name] / steps)
            for (kind, name), total in sorted(took.items(), key=lambda item: (-item[1], item[0]))
            if kind != "idle"
        ]

    def _each(self, nanoseconds: int) -> float:
        return nanoseconds / len(self.recorded.steps) / 1e9

    @property
    def promised(self) -> Mapping[str, float]:
        return {} if isinstance(self.promise, str) else self.promise.kinds

    def told(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "steps": list(self.recorded.steps),
            "rank": self.rank,
            "ranks": self.ranks,
            "device": self.device,
            "source": self.recorded.source,
            "step_s": self.step_s,
            "kinds": {kind: self._told_of(kind) for kind in KINDS},
            "messages_hidden_s": self.hidden_s,
            "promise": None
            if isinstance(self.promise, str)
            else {"of": self.promise.of, "step_s": self.promise.step_s},
            "no_promise": self.promise if isinstance(self.promise, str) else None,
            "versions": dict(self.versions),
        }

    def _told_of(self, kind: str) -> dict[str, Any]:
        biggest = [one for one in self.biggest if one.kind == kind][: None if kind == "other" else NAMED]
        return {
            "seconds": self.seconds(kind),
            "share": self.seconds(kind) / self.step_s,
            "promised_s": self.promised.get(kind),
            "biggest": [{"name": one.name, "seconds": one.seconds, "pieces": one.pieces} for one in biggest],
        }
