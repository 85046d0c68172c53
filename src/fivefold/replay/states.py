"""What one rank keeps for its optimizer from one step to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fivefold.axes.layout import Layout, Place
from fivefold.axes.pieces import pieces, size_of
from fivefold.ledger.ledger import Held
from fivefold.ledger.optimizer import counter_bytes, master_bytes, moment_bytes
from fivefold.ledger.setup import Setup

if TYPE_CHECKING:
    from fivefold.config import Job


def optimizer_states(job: Job, place: Place) -> Iterator[Held]:
    """Master weights where they are a copy of their own, moments, averaged weights, step counters."""
    setup, size = Setup.of(job), size_of(pieces(job, place), Layout.of(job), place)
    lines = {
        "master weights (FSDP's padded shards)" if setup.zero else "master weights": master_bytes(
            setup, size.shard
        ),
        "moments and averages": moment_bytes(setup, size.updated),
        "step counters": counter_bytes(setup, size.tensors),
    }
    return (Held("states", what, int(size), int(size)) for what, size in lines.items())
