"""Where everything is: which parts of the model are in which stage, and which stages on which rank."""

import math
from functools import lru_cache
from itertools import islice

from fivefold.config import Job
from fivefold.ledger.setup import Setup
from fivefold.models.flops import flops_per_token
from fivefold.models.spec import ModelSpec
from fivefold.schedules import Action


def stages(job: Job) -> list[list[str]]:
    """The parts of the model ("embedding", "blocks.3", "head") that each stage computes, in order."""
    blocks = (f"blocks.{layer}" for layer in range(job.spec.layers))
    counts = stage_layers(job.spec, job.training.seq_len, int(Setup.of(job).stages))
    found = [list(islice(blocks, count)) for count in counts]
    found[0].insert(0, "embedding")
    found[-1].append("head")
    return found


@lru_cache(maxsize=1024)
def stage_layers(spec: ModelSpec, seq_len: int, stages: int) -> tuple[int, ...]:
    """How many layers each stage has, in order; the head counts as the layers that it takes as long as."""
    if stages == 1:
        return (spec.layers,)
    flops = flops_per_token(spec, seq_len)
    block = (flops.blocks + flops.attention) / spec.layers
    return tuple(layer_counts(spec.layers, stages, flops.head / block))


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


def stages_of(job: Job, position: int) -> list[int]:
    """The numbers of the stages that the rank at `position` along pp computes, in forward order."""
    setup = Setup.of(job)
    return setup.pipeline.stages_of(position, int(setup.pp), int(setup.virtual_stages))


def parts_of(job: Job, position: int) -> dict[int, list[str]]:
    """By stage, the parts of the model that the rank at `position` along pp computes, in forward order."""
    every = stages(job)
    return {stage: every[stage] for stage in stages_of(job, position)}


def rank_of(job: Job, stage: int) -> int:
    """The position along pp of the rank that computes a stage."""
    return Setup.of(job).pipeline.rank_of(stage, job.layout.pp)


def few_micro_batches(job: Job) -> int:
    """How many micro-batches fill the job's pipeline: few, but enough for every rank to have several."""
    schedule, pp = Setup.of(job).pipeline, job.layout.pp
    return next(count for count in range(2 * pp, 4 * pp + 1) if schedule.allows(pp, count))


def actions(job: Job) -> list[list[Action]]:
    """What every rank of the job's pipeline does in one step, sends and receives included."""
    setup = Setup.of(job)
    return setup.pipeline.actions(int(setup.pp), int(setup.micro_batches), int(setup.virtual_stages))
