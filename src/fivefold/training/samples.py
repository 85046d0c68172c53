"""The sample log, `samples.jsonl`: which samples every step of a run was trained on.

A line a step, written by rank 0. It has the first and the last place in the order of samples, and a digest
of the sequences that ranks took from their loaders. A sequence's digest is over its place and its tokens; a
step's is their sum. So every rank adds up its own, the sum over ranks travels in the step's own message, and
no layout changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.problems import BadNews
from fivefold.training.lines import LineFile, read_lines

if TYPE_CHECKING:
    from fivefold.data.batch import Batch

FILE = "samples.jsonl"
BITS = 38
"""Of a digest: the sum over 32,768 data ranks is still exact in a float64, as which it is sent."""


@dataclass(frozen=True)
class StepSamples:
    """What a step was trained on: places `first` to `last` in the order of samples, and a digest of them.

    The digest of a step that was left out on purpose (`resilience.non_finite`) is empty.
    """

    step: int
    attempt: int
    first: int
    last: int
    digest: str


def digest(batches: Sequence[Batch]) -> int:
    """One number for the sequences of these micro-batches, by their places and what they hold."""
    total = 0
    for batch in batches:
        for row, (tokens, targets) in enumerate(zip(batch.tokens, batch.targets, strict=True)):
            hashed = hashlib.blake2b((batch.first + row).to_bytes(8, "little"), digest_size=8)
            hashed.update(tokens.numpy())
            hashed.update(targets.numpy())
            total += int.from_bytes(hashed.digest(), "little")
    return total % (1 << BITS)


class SampleLog:
    """Writes the lines of one attempt at a run. Only rank 0 has one."""

    def __init__(self, folder: Path, attempt: int):
        self.file = LineFile(folder / FILE)
        self._attempt = attempt

    def write(self, step: int, first: int, count: int, total: int | None) -> None:
        """Log one step: `count` samples from place `first` on, whose digests add up to `total`.

        None: the step was left out.
        """
        line = {"step": step, "attempt": self._attempt, "first": first, "last": first + count - 1}
        self.file.write({**line, "digest": "" if total is None else f"{total % (1 << BITS):010x}"})


def read_samples(folder: Path, until: int | None = None) -> list[StepSamples]:
    """What the weights of step `until` (default: the last) were trained on: one entry a step, from 1 on.

    Steps that a restart took anew count as the last attempt took them. Raises `BadNews` where a step is
    missing, or a sample was skipped or repeated.
    """
    found: list[StepSamples] = []
    for line in read_lines(folder / FILE):
        try:
            entry = StepSamples(**line)
        except TypeError:
            continue
        while found and found[-1].step >= entry.step:  # what a restart took up before does not count
            found.pop()
        found.append(entry)
    found = [entry for entry in found if until is None or entry.step <= until]
    for expected, entry in enumerate(found, 1):
        if entry.step != expected:
            raise BadNews(f"{folder / FILE}: step {expected} is missing")
    if until is not None and len(found) < until:
        raise BadNews(f"{folder / FILE}: step {len(found) + 1} is missing")
    place = 0
    for entry in found:
        if entry.first != place:
            kind = "skipped" if entry.first > place else "repeated"
            raise BadNews(f"{folder / FILE}: samples are {kind} at step {entry.step}")
        place = entry.last + 1
    return found
