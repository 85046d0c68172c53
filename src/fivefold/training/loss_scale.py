"""Dynamic loss scaling for fp16, whose smallest gradients would otherwise round to zero.

The scale doubles after a long run of finite steps and halves at each overflow. Every rank sees the same
global gradient norm, so every rank takes the same decision without a message of its own.
"""

from dataclasses import dataclass

GROWTH_INTERVAL = 2000
SMALLEST = 1.0


@dataclass
class LossScale:
    value: float
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        """Note how a step went."""
        if not finite:
            self.value /= 2
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps % GROWTH_INTERVAL == 0:
            self.value *= 2

    @property
    def usable(self) -> bool:
        """Below the smallest scale it is not the scale that makes the numbers overflow."""
        return self.value >= SMALLEST
