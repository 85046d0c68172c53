"""Bad input, said the way a person wants to hear it.

Every check in fivefold collects `Problem`s instead of raising at the first one, so that a user
sees all that is wrong with a job at once, before any rank starts.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the input.

    key      where: the dotted path of the setting (`training.global_batch`), or a file, or an option
    message  what is wrong, with the value that was given
    hint     what is allowed, or which number to change and to what; empty when the message says it all
    """

    key: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" + (f"\n    {self.hint}" if self.hint else "")


class BadInput(Exception):  # noqa: N818
    """Raised once, with every problem found. The command line turns it into exit code 2."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[BadInput], tuple[list[Problem]]]:
        return BadInput, (self.problems,)


class BadNews(Exception):  # noqa: N818
    """The question was a good one, and the answer is no. The command line turns it into exit code 1."""


def unwritable(path: str | None, option: str) -> list[Problem]:
    """Why no file can be written there; found before the work whose outcome it is to hold."""
    if path is None:
        return []
    file = Path(path).absolute()
    if file.is_dir():
        return [Problem(option, f"'{path}' is a folder", "Give the name of a file.")]
    if not file.parent.is_dir():
        return [Problem(option, f"'{path}': there is no folder {Path(path).parent}", "Make it first.")]
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return [Problem(option, f"'{path}' cannot be written", "Choose another place.")]
    return []


def refuse(problems: Iterable[Problem]) -> None:
    """Raise `BadInput` if there is any problem."""
    found = list(problems)
    if found:
        raise BadInput(found)


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that names the closest known word, or lists what is known."""
    names = sorted(known)
    close = closest(word, names)
    if close:
        return f"Did you mean '{close}'?"
    return "Known here: " + ", ".join(names) + "."


def either(choices: Sequence[object]) -> str:
    """`1, 2 or 4`; of a long list its beginning."""
    *others, last = map(str, choices[:8])
    return f"{', '.join(others)} or {last}" if others else last


def nearest_multiples(number: int, unit: int, most: float = float("inf")) -> str:
    """The multiples of `unit` around `number`, in words; 0 is none, and none is above `most`.

    Where there is no such multiple: empty.
    """
    below = number // unit * unit
    found = [n for n in (below, below + unit) if 0 < n <= most]
    return either(found) if found else ""
