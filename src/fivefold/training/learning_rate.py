"""The learning rate of each step."""

import math

from fivefold.config import Optimizer as Settings


def learning_rate(settings: Settings, step: int, steps: int) -> float:
    """The rate for `step` (from 1) of `steps`: linear warm-up, then the schedule.

    cosine    half a cosine from lr down to min_lr * lr at the last step
    wsd       constant, then linear down to min_lr * lr over the last `decay` fraction of the steps
    constant  lr
    """
    warmup = min(settings.warmup, steps)
    if step <= warmup:
        return settings.lr * step / warmup
    floor = settings.lr * settings.min_lr
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "wsd":
        decay = max(1, round(settings.decay * steps))
        left = min(1.0, (steps - step) / decay)
        return floor + (settings.lr - floor) * left
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + (settings.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
