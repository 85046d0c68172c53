"""What one rank holds and sends in one optimizer step, put together from the axes' lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fivefold.axes import data, expert, pipeline, tensor
from fivefold.axes.groups import spelled
from fivefold.axes.layout import Layout, Place
from fivefold.axes.messages import block_messages, late_messages, step_messages
from fivefold.axes.pieces import EMBEDDING, Piece, pieces, size_of
from fivefold.axes.sharding import played_step, sharded_groups
from fivefold.axes.stages import rank_of, stage_count, stages, stages_of
from fivefold.ledger.ledger import Held, Ledger, Message, joined, repeated
from fivefold.ledger.optimizer import counter_bytes, master_bytes, moment_bytes
from fivefold.ledger.recompute import segment_length
from fivefold.ledger.setup import Setup
from fivefold.ledger.work import Work, block_work, embedding_work, head_work, recomputed

if TYPE_CHECKING:
    from fivefold.config import Job

Received = Mapping[int, Sequence[int]]
"""By layer and micro-batch, how many tokens came to this rank's experts."""


def account(job: Job, place: Place | None = None, received: Received | None = None) -> Ledger:
    """What the rank at `place`, by default the first, holds, computes and sends in one steady step.

    Where sizes do not divide, the first rank along an axis holds the most: that is the one to plan for.

    received  where a live step is to be accounted for (see `log_received`). Without it tokens are
              taken to be dealt to the experts in turn, which is exact under balanced routing.
    """
    place = place or Place()
    mine = pieces(job, place)
    messages = [
        *pass_messages(job, place, received),
        *_state_messages(job, place, mine),
        *step_messages(Setup.of(job)),
    ]
    ledger = Ledger().do(pass_work(job, place)).send(*spelled(joined(messages), Layout.of(job)))
    return ledger.hold(*_held(job, place, mine), *_states(job, place, mine))


def pass_work(job: Job, place: Place) -> Iterator[Work]:
    """The work of all micro-batches' forward and backward passes, with what recomputation repeats."""
    setup, cut = Setup.of(job), stages(job)
    block = block_work(setup)
    for parts in (cut[number] for number in stages_of(job, place.pp)):
        layers = sum(part.startswith("blocks.") for part in parts)
        length = segment_length(setup.recompute, layers)
        segments = 0 if length is None else math.ceil(layers / length)
        inner = 0 if length is None else layers - segments
        for work, count in (
            (embedding_work(setup), parts.count("embedding")),
            (block, layers),
            (recomputed(block, last=True), segments),
            (recomputed(block), inner),
            (head_work(setup), parts.count("head")),
        ):
            yield from (replace(one, count=one.count * count * setup.micro_batches) for one in work if count)


def pass_messages(job: Job, place: Place, received: Received | None = None) -> Iterator[Message]:
    """The messages of all micro-batches' forward and backward passes: of the tp, cp, ep and pp axes."""
    setup, cut = Setup.of(job), stages(job)
    repeats = setup.micro_batches
    for number in stages_of(job, place.pp):
        parts = cut[number]
        layers = [int(part.removeprefix("blocks.")) for part in parts if part.startswith("blocks.")]
        length = segment_length(setup.recompute, len(layers)) or 1
        for place_in_stage, layer in enumerate(layers, start=1):
            closes = place_in_stage % length == 0 or place_in_stage == len(layers)
            for coming, times in _coming(job, place, layer, received):
                balanced = bool(job.training.balance_weight)
                messages = block_messages(
                    setup, closes_segment=closes, coming=coming, balanced_by_loss=balanced
                )
                yield from repeated(messages, times)
        if "embedding" in parts:
            yield from repeated(tensor.embedding_messages(setup), repeats)
        if "head" in parts:
            yield from repeated(tensor.head_messages(setup), repeats)
        if number > 0 and rank_of(job, number - 1) != place.pp:
            yield from repeated(pipeline.boundary_messages(setup, "after"), repeats)
        if number < stage_count(job) - 1 and rank_of(job, number + 1) != place.pp:
            yield from repeated(pipeline.boundary_messages(setup, "before"), repeats)


def _coming(job: Job, place: Place, layer: int, received: Received | None) -> list[tuple[int, int]]:
    """How many tokens come to this rank's experts, and in how many micro-batches so many do."""
    setup = Setup.of(job)
    if received:
        return list(Counter(received[layer]).items())
    dealt = 0
    if setup.spec.experts is not None:
        dealt = int(expert.dealt(setup, place.dp_shard * job.layout.cp + place.cp))
    return [(dealt, int(setup.micro_batches))]


def _state_messages(job: Job, place: Place, mine: list[Piece]) -> Iterator[Message]:
    """What the data axis sends for this rank's pieces, and the sums after backward."""
    setup, layout = Setup.of(job), Layout.of(job)
    if layout.zero:
        for group in sharded_groups(job, place):
            yield from data.group_messages(setup, group.part, group.padded, experts=group.experts)
    else:
        for name, buckets in data.gradient_buckets(mine, setup).items():
            for bucket in buckets:
                yield from data.bucket_sum(setup, sum(mine[index].count for index in bucket), name)
    yield from late_messages(setup, size_of(mine, layout, place))


# --- what is held ------------------------------------------------------------------------------------------


def _held(job: Job, place: Place, mine: list[Piece]) -> tuple[Held, Held]:
    """Weights and gradients."""
    if job.layout.zero:
        return _sharded(job, place)
    precision = Setup.of(job).precision
    elements = sum(piece.count for piece in mine)
    weights, gradients = elements * precision.compute_bytes, elements * precision.reduce_bytes
    # While micro-batches add up, the head's gradient of a tied weight waits beside them for the embedding's.
    whole_here = job.spec.tied and not any(piece.shared for piece in mine)
    tied = sum(piece.count for piece in mine if piece.name == EMBEDDING)
    waiting = tied * precision.compute_bytes if whole_here and Setup.of(job).micro_batches > 1 else 0
    return (
        Held("weights", "compute weights", rest=weights, peak=weights),
        Held("gradients", "whole gradients", rest=gradients, peak=gradients + waiting),
    )


def _sharded(job: Job, place: Place) -> tuple[Held, Held]:
    play = played_step(job, place)
    weights, gradients = play.weights, play.gradients
    what = "gradient shards, and whole ones until they are reduced"
    return (
        Held("weights", "gathered compute weights", weights.now, weights.peak),
        Held("gradients", what, gradients.now, gradients.peak),
    )


def _states(job: Job, place: Place, mine: list[Piece]) -> Iterator[Held]:
    """Master weights where they are a copy of their own, moments, averaged weights, step counters."""
    setup, size = Setup.of(job), size_of(mine, Layout.of(job), place)
    lines = {
        "master weights (FSDP's padded shards)" if setup.zero else "master weights": master_bytes(
            setup, size.shard
        ),
        "moments and averages": moment_bytes(setup, size.updated),
        "step counters": counter_bytes(setup, size.tensors),
    }
    return (Held("states", what, int(size), int(size)) for what, size in lines.items())
