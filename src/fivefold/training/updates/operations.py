"""AdamW of one parameter by torch's operations, block by block: what the kernel of a GPU does in one pass.

    g  = scale * gradient                       clipping, folded in
    w  = (1 - lr decay) w
    m  = m + (1 - beta1) (g - m)
    v  = beta2 v + (1 - beta2) g g
    w  = w - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

in float32. Torch's own kernels have the same formula, and other last bits. Moments in bfloat16 or 8 bits are
widened before, and the new ones are rounded by chance (`moments.py`) when they are stored: the weight moves
by what they were before that. A copy in 16 bits that the model computes with is written in the same pass.

Muon's momentum likewise is read and written once where it is kept in bfloat16.
"""

import math
from typing import NamedTuple

from torch import Tensor

from fivefold.config import Optimizer as Settings
from fivefold.training.updates import moments, stochastic
from fivefold.training.updates.places import Places

BLOCK = 1 << 18
"""Elements that are worked on at a time on a CPU: bounds what is between gradient and weight."""


class Numbers(NamedTuple):
    """What the formula takes of the settings in one update: the same for every element of a parameter."""

    keep: float
    share: float
    keep_square: float
    share_square: float
    root: float
    eps: float
    size: float

    @classmethod
    def of(cls, settings: Settings, lr: float, decay: float, count: int) -> "Numbers":
        """Of the update number `count`, from 1."""
        first, second = settings.betas
        return cls(
            keep=1 - lr * decay,
            share=1 - first,
            keep_square=second,
            share_square=1 - second,
            root=math.sqrt(1 - second**count),
            eps=settings.eps,
            size=lr / (1 - first**count),
        )


class Operands(NamedTuple):
    """The tensors of one parameter that an update reads and writes.

    moments  AdamW has two
    copy     what the model computes with, where that is a copy of the master
    """

    gradient: Tensor
    master: Tensor
    moments: tuple[Tensor, ...]
    copy: Tensor | None


def adamw(
    operands: Operands, numbers: Numbers, scale: Tensor | None, places: Places, key: stochastic.Key
) -> None:
    """One update of a parameter, block by block, by torch's operations: each rounds once, on any device."""
    written = [operands.master, *operands.moments, *([] if operands.copy is None else [operands.copy])]
    flat = [operands.gradient.reshape(-1), *(each.view(-1) for each in written)]
    for start in range(0, operands.master.numel(), BLOCK):
        stop = min(start + BLOCK, operands.master.numel())
        gradient, master, *others = (each[start:stop] for each in flat)
        g = gradient.float() if scale is None else gradient.float() * scale
        m, v = moments.widened(others[0], others[1])
        m = m + numbers.share * (g - m)
        v = v * numbers.keep_square + numbers.share_square * g * g
        root = v.double().sqrt().float()  # rounded to the nearest, which a CPU's own in float32 is not
        denominator = root / numbers.root + numbers.eps
        master.mul_(numbers.keep).sub_(numbers.size * m / denominator)
        kept = moments.narrowed(m, v, others[0].dtype, places, start, key)
        for stored, new in zip(others[:2], kept, strict=True):
            stored.copy_(new)
        for copy in others[2:]:
            copy.copy_(master)


def momentum(
    gradient: Tensor, kept: Tensor, mu: float, scale: Tensor | None, places: Places, key: stochastic.Key
) -> None:
    """One update of Muon's momentum in bfloat16; `gradient` becomes what is to be orthogonalised.

    m = mu m + scale * gradient, and gradient = scale * gradient + mu m with the new m, before it is rounded.
    """
    flat, stored = gradient.view(-1), kept.view(-1)
    for start in range(0, gradient.numel(), BLOCK):
        stop = min(start + BLOCK, gradient.numel())
        g = flat[start:stop].float() if scale is None else flat[start:stop].float() * scale
        m = mu * stored[start:stop].float() + g
        flat[start:stop].copy_(g + mu * m)
        words = stochastic.random_words(places.indices(start, stop, gradient.device), key)
        stored[start:stop].copy_(stochastic.rounded(m, stochastic.half(words, 0)))
