"""A simulated step with all that is said about it: what text, picture and trace are made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fivefold.planner.play.timeline import Event

Curve = Sequence[tuple[float, float]]
"""(time, level from then on), at each change."""


class Look(NamedTuple):
    """How a kind of event is drawn: by letter and colour on a terminal, by colour and name in a picture."""

    letter: str
    terminal: str
    colour: str
    name: str


LOOKS = {
    "forward": Look("F", "\033[44;97m", "#4c86c6", "forward"),
    "backward": Look("B", "\033[42;30m", "#3f9c7a", "backward"),
    "backward-input": Look("B", "\033[42;30m", "#3f9c7a", "backward, inputs"),
    "backward-weight": Look("W", "\033[43;30m", "#f0b35a", "backward, weights"),
    "gather": Look("G", "\033[45;97m", "#9a7bc0", "gather weights"),
    "reduce": Look("R", "\033[41;97m", "#d1697a", "reduce gradients"),
    "optimizer": Look("O", "\033[47;30m", "#8a8f98", "optimizer"),
    "exposed": Look("D", "\033[41;97m", "#d1697a", "messages of the data axis, not hidden"),
}


@dataclass(frozen=True, repr=False)
class Shown:
    """What is shown of a step.

    title    what was simulated
    rows     events in the order of time, and what each row is called
    curves   what is kept in memory over time: a name and a curve for each line of the picture
    kept     what the curves count
    summary  figures in words
    figures  the same for programs
    unit     of time in events and curves: "ms" or "s"
    counted  which number of an event is written on it: its micro-batch's, or its stage's
    """

    title: str
    rows: Mapping[str, Sequence[Event]]
    curves: Mapping[str, Curve]
    kept: str
    summary: str
    figures: Mapping[str, Any]
    unit: str
    counted: Literal["micro_batch", "stage"] = "micro_batch"

    def __repr__(self) -> str:
        return f"<{self.title}>"

    @property
    def start(self) -> float:
        return min(row[0].start for row in self.rows.values() if row)

    @property
    def end(self) -> float:
        return max(row[-1].end for row in self.rows.values() if row)

    def number(self, event: Event) -> str:
        """What is written on an event; nothing on those that belong to no stage, or to all micro-batches."""
        number: int = getattr(event, self.counted)
        return str(number) if event.stage >= 0 and number >= 0 else ""

    @property
    def microseconds(self) -> float:
        """How many of them the unit of time has."""
        return {"ms": 1e3, "s": 1e6}[self.unit]
