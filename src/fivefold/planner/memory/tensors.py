"""What the tensors of one rank take at the fullest moment of a step."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.ledger.setup import Figure, Number


@dataclass(frozen=True)
class Tensors:
    """Bytes; see `memory.StageMemory` for the words.

    spared  what is never there at the same moment as all the rest
    """

    number: Number
    weights: Figure
    gradients: Figure
    states: Figure
    activations: Figure
    transient: Figure
    spared: Figure = 0.0

    @property
    def rest(self) -> Figure:
        """What no micro-batch changes."""
        return self.weights + self.gradients + self.states
