"""Where loss or gradients are not finite, and the job does not want to stop for it (`resilience.non_finite`).

All ranks take the same decision without a message of its own: loss and gradient norm are those of all ranks
together, and no weight has been touched when they are looked at.
"""

from dataclasses import replace
from math import nan
from pathlib import Path

import torch.distributed as dist

from fivefold.training.build import Built
from fivefold.training.checkpoint import Progress, Saver, load_latest
from fivefold.training.failures import NonFiniteError
from fivefold.training.step import StepResult

MOST_SKIPS = 10
"""A run that skips such steps ends at this many in a row: its weights are no longer good for anything."""
NOT_TAKEN = StepResult(nan, nan, 0, skipped=True)
"""A step that is left out after a rollback."""


def skips_after(skips: int, result: StepResult, step: int) -> int:
    """How many updates in a row were skipped, this step's included. Raises `NonFiniteError` at too many."""
    if not result.skipped:
        return 0
    if result.problem is None:  # it was not taken for another reason
        return skips
    if skips + 1 == MOST_SKIPS:
        raise NonFiniteError(f"{result.problem} It is the {MOST_SKIPS}th such step in a row.", step)
    return skips + 1


def rolled_back(built: Built, saver: Saver, run: Path, now: Progress, bad: int) -> Progress | None:
    """Take up the last checkpoint, from which on step `bad` is left out too; None where there is none.

    Every rank calls it.
    """
    saver.wait()
    if dist.is_initialized():
        dist.barrier()  # rank 0 makes a checkpoint of what all have written: then all see the same ones
    found, _ = load_latest(built, run)
    if found is None:
        return None
    return replace(found, left_out=sorted({*found.left_out, *now.left_out, bad}))
