"""What one rank holds and sends in one optimizer step: its ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.axes.layout import Place
from fivefold.axes.pieces import EMBEDDING, pieces
from fivefold.axes.rank_messages import Received, rank_messages
from fivefold.ledger.ledger import Held, Ledger
from fivefold.ledger.setup import Setup
from fivefold.replay.states import optimizer_states
from fivefold.replay.weights_program import replayed_weights

if TYPE_CHECKING:
    from fivefold.config import Job


def account(job: Job, place: Place | None = None, received: Received | None = None) -> Ledger:
    """What the rank at `place` (the first one by default) holds and sends in one steady optimizer step.

    Where sizes do not divide, the first rank along an axis holds the most: that is the one to plan for.

    received  what tests of running ranks have logged. Without it tokens are taken to be dealt to the
              experts in turn, which is exact under balanced routing.
    """
    place = place or Place()
    held = _sharded(job, place) if job.layout.zero else _replicated(job, place)
    ledger = Ledger().send(*rank_messages(job, place, received))
    return ledger.hold(*held, *optimizer_states(job, place))


def _sharded(job: Job, place: Place) -> tuple[Held, Held]:
    """Weights and gradients under zero 1 to 3: a step is replayed, with its weights and gradients alone."""
    weights, gradients = replayed_weights(job, place)
    what = "gradient shards, and whole ones until they are reduced"
    return (
        Held("weights", "gathered compute weights", int(weights.now), int(weights.peak)),
        Held("gradients", what, int(gradients.now), int(gradients.peak)),
    )


def _replicated(job: Job, place: Place) -> tuple[Held, Held]:
    """Weights and gradients under zero 0: all of them, all the time."""
    setup, mine = Setup.of(job), pieces(job, place)
    elements = sum(piece.count for piece in mine)
    weights = elements * setup.precision.compute_bytes
    gradients = elements * setup.precision.reduce_bytes
    # While micro-batches add up, the head's gradient of a tied weight waits beside them for the embedding's.
    whole_here = job.spec.tied and not any(piece.shared for piece in mine)
    tied = sum(piece.count for piece in mine if piece.name == EMBEDDING)
    waiting = tied * setup.precision.compute_bytes if whole_here and setup.micro_batches > 1 else 0
    return (
        Held("weights", "compute weights", rest=weights, peak=weights),
        Held("gradients", "whole gradients", rest=gradients, peak=gradients + waiting),
    )
