"""Where everything is in a pipeline: which layers make up each stage, and which rank holds it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fivefold.ledger.setup import Setup
from fivefold.models.flops import flops_per_token
from fivefold.models.inventory import parameters
from fivefold.schedules import Action, Schedule, schedule_named

if TYPE_CHECKING:
    from fivefold.config import Job


def stages(job: Job) -> list[list[str]]:
    """The parts of the model ("embedding", "blocks.3", "head") that each stage computes, in order."""
    parts = list(dict.fromkeys(p.part for p in parameters(job.spec)))
    if job.layout.pp == 1:
        return [parts]
    flops = flops_per_token(job.spec, job.training.seq_len)
    block = (flops.blocks + flops.attention) / job.spec.layers
    found, start = [], 1
    for count in layer_counts(job.spec.layers, stage_count(job), flops.head / block):
        found.append(parts[start : start + count])
        start += count
    return [["embedding", *found[0]], *found[1:-1], [*found[-1], "head"]]


def layer_counts(layers: int, stages: int, head: float) -> list[int]:
    """How many layers each stage gets, at least one, so that the slowest stage is as fast as can be.

    head  what the last stage computes beside its layers, in layers (the first one's lookup costs nothing)
    """
    others = stages - 1

    def slowest(last: int) -> tuple[float, int]:
        return max(math.ceil((layers - last) / others), last + head), -last

    last = min(range(1, layers - others + 1), key=slowest)
    # Early stages keep the most micro-batches in memory: what does not divide goes to the later ones.
    short, longer = divmod(layers - last, others)
    return [short] * (others - longer) + [short + 1] * longer + [last]


def stage_count(job: Job) -> int:
    """Stages in all, over every rank of the pipeline."""
    return job.layout.pp * (job.layout.virtual_stages or 1)


def stages_of(job: Job, position: int) -> list[int]:
    """The numbers of the stages that the rank at `position` along pp computes, in forward order."""
    if job.layout.pp == 1:
        return [0]
    return schedule_of(job).stages_of(position, job.layout.pp, job.layout.virtual_stages or 1)


def rank_of(job: Job, stage: int) -> int:
    """The position along pp of the rank that computes a stage."""
    return 0 if job.layout.pp == 1 else schedule_of(job).rank_of(stage, job.layout.pp)


def few_micro_batches(job: Job) -> int:
    """How many micro-batches fill the job's pipeline: few, but enough for every rank to have several."""
    schedule, pp = schedule_of(job), job.layout.pp
    return next(count for count in range(2 * pp, 4 * pp + 1) if schedule.allows(pp, count))


def actions(job: Job) -> list[list[Action]]:
    """What every rank of the job's pipeline does in one step, sends and receives included."""
    count = int(Setup.of(job).micro_batches)
    return schedule_of(job).actions(job.layout.pp, count, job.layout.virtual_stages or 1)


def schedule_of(job: Job) -> Schedule:
    """The schedule of a resolved job's pipeline."""
    if job.layout.schedule is None:
        raise ValueError("the job's schedule is still open: call fivefold.config.resolve first")
    return schedule_named(job.layout.schedule)
