"""The whole account of one rank: every axis in the order in which the model is split, then the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fivefold.axes import context, data, expert, pipeline, tensor
from fivefold.axes.groups import spelled
from fivefold.axes.layout import Layout, Place
from fivefold.axes.pieces import pieces
from fivefold.axes.sharding import shard_count, shard_elements
from fivefold.axes.traffic import step_messages
from fivefold.ledger.ledger import Held, Ledger
from fivefold.ledger.optimizer import COUNTER_BYTES, moment_bytes
from fivefold.ledger.precision import precision_named
from fivefold.ledger.setup import Setup

if TYPE_CHECKING:
    from fivefold.config import Job


def account(
    job: Job, place: Place | None = None, received: Mapping[int, Sequence[int]] | None = None
) -> Ledger:
    """What the rank at `place` (the first one by default) holds and sends in one steady optimizer step.

    Where sizes do not divide, the first rank along an axis holds the most: that is the one to plan for.

    received  how many tokens came to this rank's experts, by layer and micro-batch, where a live step is
              to be accounted for (see `expert.account`); by default as many to each
    """
    place = place or Place()
    ledger = expert.account(Ledger(), job, place, received)
    for axis in (pipeline, tensor, context, data):
        ledger = axis.account(ledger, job, place)
    ledger = _account_states(ledger, job, place)
    ledger = _account_late_sums(ledger, job, place)
    return _account_step(ledger, job)


def _account_states(ledger: Ledger, job: Job, place: Place) -> Ledger:
    """Master weights where they are a copy of their own, moments, averaged weights, step counters."""
    layout = Layout.of(job)
    precision = precision_named(job.training.precision)
    settings = job.optimizer
    mine = pieces(job, place)
    updated = [shard_count(piece, layout, place) for piece in mine]
    if layout.zero > 0:
        masters = shard_elements(job, place) * precision.master_bytes
        ledger = ledger.hold(Held("states", "master weights (FSDP's padded shards)", masters, masters))
    elif precision.mixed:
        masters = sum(updated) * precision.master_bytes
        ledger = ledger.hold(Held("states", "master weights", masters, masters))
    moments = moment_bytes(
        settings.name, sum(updated), precision, momentum=settings.momentum, ema=settings.ema is not None
    )
    counters = COUNTER_BYTES[settings.name] * sum(count > 0 for count in updated)
    return ledger.hold(
        Held("states", "moments and averages", moments, moments),
        Held("states", "step counters", counters, counters),
    )


def _account_late_sums(ledger: Ledger, job: Job, place: Place) -> Ledger:
    """After backward: gradients that tp ranks have in part, all in one message."""
    layout = Layout.of(job)
    size = precision_named(job.training.precision).reduce_bytes
    partial = [piece for piece in pieces(job, place) if piece.partial]
    payload = sum(shard_count(piece, layout, place) for piece in partial) * size
    return ledger.send(tensor.late_sum(payload, layout.tp))


def _account_step(ledger: Ledger, job: Job) -> Ledger:
    """The step's own small messages."""
    return ledger.send(*spelled(step_messages(Setup.of(job)), Layout.of(job)))
