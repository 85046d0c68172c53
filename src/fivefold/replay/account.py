"""What one rank holds, computes and sends in one optimizer step."""

import math
from collections.abc import Iterator
from dataclasses import replace

from fivefold.axes.data import residual_bytes
from fivefold.axes.layout import Layout, Place
from fivefold.axes.messages import Received, rank_messages
from fivefold.axes.muon import exchange_bytes
from fivefold.axes.outer import replica_of
from fivefold.axes.pieces import gradient_bytes, pieces, size_of
from fivefold.axes.stages import parts_of
from fivefold.config import Job
from fivefold.ledger.ledger import Held, Ledger, sent
from fivefold.ledger.offload import buffer_bytes, masters_on_host
from fivefold.ledger.setup import Setup, segment_length
from fivefold.ledger.work import Work, block_work, embedding_work, head_work, recomputed
from fivefold.models.inventory import EMBEDDING
from fivefold.replay.sharded_step import ShardedStep


def account(job: Job, place: Place | None = None, received: Received | None = None) -> Ledger:
    """What the rank at `place`, by default the first, holds, computes and sends in one steady step.

    Where sizes do not divide, the first rank along an axis holds the most: that is the one to plan for.

    received  what tests of running ranks have logged. Without it tokens are taken to be dealt to the
              experts in turn, which is exact under balanced routing.
    """
    place = place or Place()
    if job.communication.takes_outer_steps:  # what a step holds and computes is one replica's
        alone = account(replica_of(job), replace(place, dp_replicate=0), received)
        messages = sent(rank_messages(job, place, received))
        return replace(alone, held=(*alone.held, _outer_states(job, place)), messages=messages)
    held = _sharded(job, place) if job.layout.zero else _replicated(job, place)
    messages = sent(rank_messages(job, place, received))
    return Ledger((*held, *_states(job, place)), tuple(_work(job, place)), messages)


def _sharded(job: Job, place: Place) -> tuple[Held, Held]:
    """Weights and gradients under zero 1 to 3: a step is played with them alone."""
    step = ShardedStep(job, place)
    what = "gradient shards, and whole ones until they are reduced"
    return (
        Held("weights", "gathered compute weights", step.weights, step.most_weights),
        Held("gradients", what, step.gradients, step.most_gradients),
    )


def _replicated(job: Job, place: Place) -> tuple[Held, Held]:
    """Weights and gradients under zero 0: all of them, all the time."""
    setup, mine = Setup.of(job), pieces(job, place)
    elements = sum(piece.count for piece in mine)
    weights = elements * setup.precision.compute_bytes
    gradients = int(gradient_bytes(setup, size_of(mine, Layout.of(job), place)))
    # While micro-batches add up, the head's gradient of a tied weight waits beside them for the embedding's.
    tied = sum(piece.count for piece in mine if piece.name == EMBEDDING and not piece.shared)
    waits = job.spec.tied and setup.micro_batches > 1
    waiting = tied * setup.precision.compute_bytes if waits else 0
    return (
        Held("weights", "compute weights", rest=weights, peak=weights),
        Held("gradients", "whole gradients", rest=gradients, peak=gradients + waiting),
    )


def _states(job: Job, place: Place) -> Iterator[Held]:
    """Master weights where they are a copy of their own, moments, averaged weights, counters, residuals."""
    setup, size = Setup.of(job), size_of(pieces(job, place), Layout.of(job), place)
    masters = "master weights (FSDP's padded shards)" if setup.zero else "master weights"
    lines = {
        masters: setup.master_bytes(size.shard),
        "moments and averages": setup.moment_bytes(size.updated, size.matrices),
        "step counters": setup.counter_bytes(size.tensors, size.matrix_tensors),
    }
    if residuals := residual_bytes(setup, size):
        lines["what compression left out"] = residuals
    hosted = {masters: masters_on_host(setup), "moments and averages": setup.offload}
    hosted |= {"step counters": setup.offload}
    for what, held in lines.items():
        yield Held("states", what, int(held), int(held), hosted.get(what, False))
    if setup.offload:
        largest = max(size_of([piece], Layout.of(job), place).updated for piece in pieces(job, place))
        buffers = int(buffer_bytes(setup, largest))
        yield Held("states", "states on their way to an update and back", 0, buffers)
    if exchanged := exchange_bytes(job, place):
        yield Held("states", "matrices that are orthogonalised, and on their way", 0, exchanged)


def _outer_states(job: Job, place: Place) -> Held:
    """Outer weights and momentum; at most, averages on their way beside them."""
    setup, size = Setup.of(job), size_of(pieces(job, place), Layout.of(job), place)
    rest = int(replace(setup, outer_delay=0).outer_bytes(size.updated))
    return Held("states", "outer weights and momentum", rest, int(setup.outer_bytes(size.updated)))


def _work(job: Job, place: Place) -> Iterator[Work]:
    """The work of all micro-batches' forward and backward passes, with what recomputation repeats."""
    setup = Setup.of(job)
    block = block_work(setup)
    for parts in parts_of(job, place.pp).values():
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
