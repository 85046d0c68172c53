"""What the optimizer asks of an update rule."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Update(Protocol):
    """Moves some of this rank's masters by their gradients, and keeps states for them.

    indices    of which masters; some may be empty shards
    kinds      names of the states that have the shape of their master; others are scalars
    publishes  it also writes what the model computes with, where that is a copy
    """

    @property
    def indices(self) -> Sequence[int]: ...

    @property
    def kinds(self) -> Sequence[str]: ...

    @property
    def publishes(self) -> bool: ...

    def step(self, lr: float, scale: Tensor | None = None) -> None:
        """Move the masters by their `.grad`, times `scale` (a scalar on the device), at the learning rate
        `lr`.
        """

    def states(self, index: int) -> dict[str, Tensor]:
        """The states of one master by name, made where there are none yet. An empty shard has them too, so
        that checkpoints look the same on every rank.
        """
        ...

    def tensors_of(self, index: int) -> list[Tensor]:
        """The states of one master that are there, always in the same order."""
        ...
