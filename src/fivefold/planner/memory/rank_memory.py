"""Memory of one rank, at the fullest moment of a step."""

from dataclasses import dataclass

from fivefold.ledger.setup import Figure, Number


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank: each part at its most, and all together at the fullest moment.

    number       position along pp
    weights      as they compute, held through the step
    gradients    as they add up over micro-batches
    states       master weights, moments
    activations  kept for backward, of every micro-batch in flight
    transient    what comes and goes: the layer that computes, the loss, gathered layers, fresh gradients
    spared       what is never there at the same moment as all the rest
    buffers      outside the allocator: communicators, the driver's context
    slack        what the allocator reserves beyond what is allocated, as a part of it
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
