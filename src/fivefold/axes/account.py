"""The whole account of one rank: every axis in the order in which the model is split, then the optimizer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fivefold.axes import data
from fivefold.axes.layout import Layout
from fivefold.ledger.ledger import Held, Ledger, Message
from fivefold.ledger.optimizer import COUNTER_BYTES, moment_bytes
from fivefold.ledger.precision import precision_named
from fivefold.models.inventory import parameters

if TYPE_CHECKING:
    from fivefold.config import Job


def account(job: Job, shard_rank: int = 0) -> Ledger:
    """What the rank at position `shard_rank` along dp_shard holds and sends in one steady optimizer step.

    Where sizes do not divide, the first rank holds the most: that is the one to plan for.
    """
    ledger = data.account(Ledger(), job)
    ledger = _account_states(ledger, job, shard_rank)
    return _account_scalars(ledger, job)


def _account_states(ledger: Ledger, job: Job, shard_rank: int) -> Ledger:
    """Master weights where they are a copy of their own, moments, averaged weights, step counters."""
    layout = Layout.of(job)
    precision = precision_named(job.training.precision)
    settings = job.optimizer
    shapes = [p.shape for p in parameters(job.spec)]
    ranks = layout.dp_shard
    rows = [data.shard_rows(shape[0], ranks, shard_rank) for shape in shapes]
    mine = [count * math.prod(shape[1:]) for count, shape in zip(rows, shapes, strict=True)]
    if layout.zero > 0:
        padded = sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes)
        masters = padded * precision.master_bytes
        ledger = ledger.hold(Held("states", "master weights (FSDP's padded shards)", masters, masters))
    elif precision.mixed:
        masters = sum(mine) * precision.master_bytes
        ledger = ledger.hold(Held("states", "master weights", masters, masters))
    moments = moment_bytes(
        settings.name, sum(mine), precision, momentum=settings.momentum, ema=settings.ema is not None
    )
    counters = COUNTER_BYTES[settings.name] * sum(count > 0 for count in mine)
    return ledger.hold(
        Held("states", "moments and averages", moments, moments),
        Held("states", "step counters", counters, counters),
    )


def _account_scalars(ledger: Ledger, job: Job) -> Ledger:
    """The step's own small messages: the token count before, the loss and the squared norm after."""
    layout = Layout.of(job)
    return ledger.send(
        Message("all_reduce", 8, layout.all_axes, layout.ranks, 1, "forward"),
        Message("all_reduce", 16, layout.all_axes, layout.ranks, 1, "optimizer"),
    )
