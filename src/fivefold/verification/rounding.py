"""How far rounding alone can take a job in its own precision from float64: a count, not a measurement.

Each rounding of an activation, or of its gradient, to a dtype with unit roundoff u is an error of at most u
of its size, and errors of different roundings have nothing to do with each other: N of them on the way to a
gradient add up like the steps of a random walk, to at most u x sqrt(N) in the root mean square over a
parameter. (Rounding errors spread evenly have a root mean square of u / sqrt(3): this is the margin.) A step
after the first begins with weights that the steps before left off by as much, and may be off by that more.
"""

import math
from dataclasses import dataclass

import torch

from fivefold.axes.layout import Layout
from fivefold.config import Job
from fivefold.ledger.precision import precision_named
from fivefold.ledger.setup import Setup
from fivefold.training.updates import codes
from fivefold.verification.compare import worst
from fivefold.verification.compute import Computed, Tensors

A_BLOCK = 12
"""Results of a block that are rounded one after the other: norm, projection, rotation, attention, projection,
sum; norm, projection, activation, product, projection, sum."""
ENDS = 8
"""Roundings of embedding, last norm, logits and their gradients, and of the weights themselves."""
PRODUCTS = 4
"""Products of a block that sum over the width of the stream, one after the other; one sums over `ffn`."""
SIGMAS = 4
"""Of a random walk: it goes further once in 16,000 times."""
OF_ALL = 0.1
"""A parameter is measured against at least this fraction of the root mean square of all gradients: the bias
of keys has no gradient at all, and rounding gives it one."""


def unit_roundoff(dtype: str) -> float:
    """The largest relative error of rounding to a dtype, by torch's name."""
    return torch.finfo(getattr(torch, dtype)).eps / 2


def roundings(job: Job) -> int:
    """How many lie one after the other on the way through a resolved job's model and back.

    A user's own model is taken for one of ours with as many blocks.
    """
    spec, others = job.spec, Layout.of(job).tp - 1
    block = A_BLOCK + 2 * spec.norm_after + 2 * spec.qk_norm + 2 * (spec.attention_softcap is not None)
    block += 2 * others  # sums over tp ranks, who add up one after the other
    ends = ENDS + 2 * (spec.final_softcap is not None)
    if precision_named(job.training.precision).compute == "float32":
        # Sums inside of a product are as precise as what they make: each of their terms is a rounding.
        block += PRODUCTS * spec.dim + spec.ffn
        ends += job.training.seq_len * (job.training.micro_batch or 1)
    return 2 * spec.layers * block + ends  # forward and backward


def of_casts(job: Job) -> float:
    """What casts to 8 bits add on the way through the model and back, of both factors of each product.

    A block has four one after the other (query, key or value; output; gate or up; down). Forward each has two
    factors in e4m3, backward a gradient in e5m2 and a weight in e4m3; a weight's own gradient is one product
    more. (Gradients of experts are in e4m3, and rounded less.) This is the root mean square itself: with 2
    and 3 bits of fraction the largest error would allow anything.
    """
    setup = Setup.of(job)
    if setup.fp8 == "none":
        return 0.0
    precise, coarse = (unit_roundoff(dtype) ** 2 / 3 for dtype in ("float8_e4m3fn", "float8_e5m2"))
    products = 4 * job.spec.layers + setup.fp8_head
    return math.sqrt(products * (3 * precise + coarse) + precise + coarse)


def of_moments(states: str) -> float:
    """What rounding of moments adds to an update, in the root mean square.

    By chance up or down, a moment is off by up to a whole step, and by up to half of one in the root mean
    square. Of the second one's error the root has half.
    """
    if states == "int8":
        return math.hypot(2.0 ** -(codes.RATIO.fraction + 1), 2.0 ** -(codes.SQUARE.fraction + 2))
    return unit_roundoff("bfloat16") if states == "bf16" else 0.0


@dataclass(frozen=True)
class InJobPrecision:
    """The root mean square over each parameter, held to what rounding can do.

    once    the largest relative error of one step
    stored  the largest relative error of one rounding of a master weight
    moments  the largest of one rounding of a moment, in the root mean square; 0 where they are as masters are
    """

    once: float
    stored: float
    moments: float = 0.0

    @classmethod
    def of(cls, job: Job) -> "InJobPrecision":
        precision = precision_named(job.training.precision)
        once = unit_roundoff(precision.compute) * math.sqrt(roundings(job))
        return cls(
            math.hypot(once, of_casts(job)), unit_roundoff(precision.master), of_moments(job.optimizer.states)
        )

    def bound(self, step: int) -> float:
        return step * self.once

    def error(self, found: Tensors, reference: Tensors) -> tuple[float, str]:
        return _rms_error(found, reference, dict.fromkeys(reference, 0.0))

    def error_of_moves(
        self, found: Tensors, reference: Tensors, begin: Tensors, roundings: int
    ) -> tuple[float, str]:
        """What rounding of the weights themselves may take away is no error, nor what that of moments may.

        A step moves weights by moments that the one before has rounded.
        """
        each = {
            name: self.stored * float(weight.norm()) + self.moments * float(reference[name].norm())
            for name, weight in begin.items()
        }
        rounded = {name: roundings * error for name, error in each.items()}
        return _rms_error(found, reference, rounded)

    def bound_of_heldout(self, reference: Computed) -> float:
        """Moves that are off, each by itself, shift the loss as a random walk along its gradient does."""
        last, moved = reference.steps[-1].gradients, reference.moved
        shift = math.sqrt(sum(float((last[name] * moved[name]).square().sum()) for name in moved))
        return self.bound(len(reference.steps)) + SIGMAS * self.moments * shift / abs(reference.heldout)


def _rms_error(found: Tensors, reference: Tensors, allowed: dict[str, float]) -> tuple[float, str]:
    """The worst ||g - g1|| / ||g1||, and of which parameter; less what is `allowed` of the numerator."""
    if found.keys() != reference.keys():
        return math.inf, min(found.keys() ^ reference.keys())
    count = sum(g.numel() for g in reference.values())
    usual = math.sqrt(sum(float(g.square().sum()) for g in reference.values()) / count)

    def error(name: str, g: torch.Tensor) -> float:
        off = float((found[name] - g).norm())
        if math.isfinite(off):
            off = max(0.0, off - allowed[name])
        return off / max(float(g.norm()), OF_ALL * usual * math.sqrt(g.numel()))

    return worst({name: error(name, g) for name, g in reference.items()})
