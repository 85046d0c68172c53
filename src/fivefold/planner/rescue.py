"""Where no layout fits: what would make one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.models.inventory import parameter_count
from fivefold.planner.answer import Answer
from fivefold.planner.goal import Goal
from fivefold.planner.search.best import search

if TYPE_CHECKING:
    from fivefold.planner.request import Request

MOST_DOUBLINGS = 11


def rescues(request: Request, found: Answer) -> list[str]:
    """What would make a layout fit, each tried: more devices, a batch that splits, shorter sequences."""
    return [line for line in (_other_batch(found), _more_devices(request, found), _shorter(found)) if line]


def _fits(goal: Goal, found: Answer) -> str | None:
    best = search(goal, found.cluster, best=1).best
    if not best:
        return None
    return f"{best[0].memory_gib:.1f} GiB, {best[0].step_time:.4g} s a step"


def _other_batch(found: Answer) -> str | None:
    """A batch that all devices can share by data parallelism alone."""
    goal = found.goal
    if goal.global_batch % goal.gpus == 0:
        return None
    batch = -(-goal.global_batch // goal.gpus) * goal.gpus
    result = _fits(goal.changed(global_batch=batch), found)
    return (
        f"With --global-batch {batch}, which {goal.gpus} devices share evenly: {result}." if result else None
    )


def _more_devices(request: Request, found: Answer) -> str | None:
    enough = 2 ** max(0, found.goal.gpus - 1).bit_length()
    doublings = (enough * 2**doubling for doubling in range(MOST_DOUBLINGS))
    gpus = found.goal.gpus
    for gpus in (count for count in doublings if count > found.goal.gpus and found.cluster.has(count)):
        if result := _fits(request.goal(gpus, found.goal.seq_len), found):
            return f"With --gpus {gpus}: {result}."
    return f"Not even {gpus:,} of these devices hold its {parameter_count(found.goal.spec):,} parameters."


def _shorter(found: Answer) -> str | None:
    goal = found.goal
    for seq_len in (goal.seq_len // 2, goal.seq_len // 4, goal.seq_len // 8):
        if seq_len < 128:
            return None
        shorter = goal.changed(seq_len=seq_len, global_batch=goal.global_batch * (goal.seq_len // seq_len))
        if result := _fits(shorter, found):
            return f"With --seq-len {seq_len} and the same tokens a step: {result}."
    return None
