"""Memory of one rank, at the fullest moment of a step; and which ranks of a pipeline are looked at.

The fullest rank of a pipeline is one of a few: the first (the embedding, and the most micro-batches in
flight), the second, the first and, under a V, the last of those with the most layers, the one with the head,
and the last. Only those are computed, so that a search over many layouts stays fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.ledger.setup import Figure, Number
from fivefold.planner.placement import Load

LOOKED_AT = ("first", "longest", "second", "head", "last longest", "last")
"""Of ranks that are equally full, the one that comes first here counts as the fullest."""


def looked_at(loads: Sequence[Load]) -> tuple[int, ...]:
    """Which ranks those of `LOOKED_AT` are, given what each rank holds."""
    most, middle = max(load.layers for load in loads), range(1, len(loads) - 1) or range(len(loads))
    longest = [rank for rank in middle if loads[rank].layers == most] or middle[:1]
    head = next(rank for rank, load in enumerate(loads) if load.head)
    return 0, longest[0], min(1, len(loads) - 1), head, longest[-1], len(loads) - 1


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank: each part at its most, and all together at the fullest moment.

    number       position along pp
    weights      as they compute, held through the step
    gradients    as they add up over micro-batches
    states       master weights, moments, on the device
    activations  kept for backward, of every micro-batch in flight
    transient    what comes and goes: the layer that computes, the loss, gathered layers, fresh gradients
    spared       what is never there at the same moment as all the rest
    buffers      outside the allocator: communicators, the driver's context
    slack        what the allocator reserves beyond what is allocated, as a part of it
    host         states that lie in the memory of a GPU's host instead
    """

    number: Number
    weights: Figure
    gradients: Figure
    states: Figure
    activations: Figure
    transient: Figure
    spared: Figure = 0.0
    buffers: Figure = 0.0
    slack: Figure = 0.0
    host: Figure = 0.0

    @property
    def allocated(self) -> Figure:
        """What tensors take at their peak."""
        held = self.weights + self.gradients + self.states
        return held + (self.activations + self.transient) - self.spared

    @property
    def reserved(self) -> Figure:
        """What torch's allocator has taken from the device for them."""
        return self.allocated * (1 + self.slack)

    @property
    def device(self) -> Figure:
        """What the device has given away in all."""
        return self.reserved + self.buffers
