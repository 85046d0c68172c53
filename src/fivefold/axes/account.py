"""The whole account of one rank: every axis in the order in which the model is split, then the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fivefold.axes import context, data, expert, pipeline, tensor
from fivefold.axes.layout import Layout, Place
from fivefold.axes.pieces import pieces
from fivefold.axes.sharding import shard_count, shard_elements
from fivefold.ledger.ledger import Held, Ledger, Message
from fivefold.ledger.optimizer import COUNTER_BYTES, moment_bytes
from fivefold.ledger.precision import precision_named

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
    return _account_scalars(ledger, job)


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
    mine = [(piece, shard_count(piece, layout, place) * size) for piece in pieces(job, place)]
    partial = sum(payload for piece, payload in mine if piece.partial)
    return ledger.send(Message("all_reduce", partial, "tp", layout.tp, int(partial > 0), "backward"))


def _account_scalars(ledger: Ledger, job: Job) -> Ledger:
    """The step's own small messages: the token count before, the loss and the squared norm after.

    Of expert models also how many tokens each expert of each layer was given.
    """
    layout, spec = Layout.of(job), job.spec
    return ledger.send(
        Message("all_reduce", 8, layout.all_axes, layout.ranks, 1, "forward"),
        Message("all_reduce", 16, layout.all_axes, layout.ranks, 1, "optimizer"),
        Message(
            "all_reduce",
            8 * spec.layers * (spec.experts or 0),
            layout.all_axes,
            layout.ranks,
            int(spec.experts is not None),
            "optimizer",
        ),
    )
