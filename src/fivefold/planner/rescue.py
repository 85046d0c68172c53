"""Where no layout fits: what would make one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from fivefold.models.inventory import parameter_count
from fivefold.planner.answer import Answer
from fivefold.planner.goal import Goal
from fivefold.planner.search.partial import best_with
from fivefold.planner.why import without_one

if TYPE_CHECKING:
    from fivefold.planner.request import Request

MOST_DOUBLINGS = 11
SHORTEST = 128

Change = tuple[str, Goal]
"""What to change, in words, and the goal so changed."""


def rescues(request: Request, found: Answer) -> list[str]:
    """What would make a layout fit, each tried: a batch that splits, more devices, shorter sequences.

    Then what letting go of one of the fixed keys would.
    """
    goal, fixed = found.goal, found.fixed
    more = list(_more_devices(request, found))
    lines = [_first_that_fits(changes, found) for changes in (_other_batch(goal), more, _shorter(goal))]
    if lines[1] is None:
        most = more[-1][1].gpus if more else goal.gpus
        keys = " with the keys that are fixed" if fixed else ""
        lines[1] = f"Not even --gpus {most} has room for its {parameter_count(goal.spec):,} parameters{keys}."
    return [line for line in lines if line is not None] + without_one(fixed, replace(found, fixed={}))


def _first_that_fits(changes: Iterator[Change] | list[Change], found: Answer) -> str | None:
    for words, goal in changes:
        if best := best_with(found.fixed, goal, found.cluster).best:
            return f"With {words}: {best[0].memory_gib:.1f} GiB, {best[0].step_time:.4g} s a step."
    return None


def _other_batch(goal: Goal) -> Iterator[Change]:
    """A batch that all devices can share by data parallelism alone."""
    if goal.global_batch % goal.gpus:
        batch = -(-goal.global_batch // goal.gpus) * goal.gpus
        words = f"--global-batch {batch}, which {goal.gpus} devices share evenly"
        yield words, goal.changed(global_batch=batch)


def _more_devices(request: Request, found: Answer) -> Iterator[Change]:
    enough = 2 ** max(0, found.goal.gpus - 1).bit_length()
    for gpus in (enough * 2**doubling for doubling in range(MOST_DOUBLINGS)):
        if gpus > found.goal.gpus and found.cluster.has(gpus):
            yield f"--gpus {gpus}", request.goal(gpus, found.goal.seq_len)


def _shorter(goal: Goal) -> Iterator[Change]:
    for part in (2, 4, 8):
        seq_len = goal.seq_len // part
        if seq_len >= SHORTEST:
            batch = goal.global_batch * (goal.seq_len // seq_len)
            changed = goal.changed(seq_len=seq_len, global_batch=batch)
            yield f"--seq-len {seq_len} and the same tokens a step", changed
