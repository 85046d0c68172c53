"""Scaling laws: how large a model, and how many tokens, for how much compute.

The final loss of a model of N parameters after D tokens is fitted as

    L(N, D) = E + A / N^alpha + B / D^beta

and training costs C = 6 N D operations. Holding C fixed, L is least where both terms fall equally fast; the
derivation is in docs/scaling.md. Which fit one believes matters more than anything else here, so every answer
names its fit.
"""

import math
import re
from contextlib import suppress
from typing import NamedTuple

from fivefold.hardware.devices import DEVICES, Device, find_device
from fivefold.problems import BadInput, Problem, did_you_mean

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""A multiplication and an addition for each weight: once forward, twice backward."""


class Fit(NamedTuple):
    """Coefficients of one fitted L(N, D)."""

    irreducible: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, params: float, tokens: float) -> float:
        """Nats a token, on the data of those who fitted."""
        of_size, of_data = math.pow(params, -self.alpha), math.pow(tokens, -self.beta)
        return self.irreducible + self.a * of_size + self.b * of_data


FITS = {
    # Besiroglu et al. 2024, arXiv:2404.10102: fitted again to the points in Hoffmann et al.'s figure
    "besiroglu-2024": Fit(1.8172, 482.01, 2085.43, 0.3478, 0.3658),
    # Hoffmann et al. 2022, arXiv:2203.15556, appendix D.3: as printed, exponents rounded
    "hoffmann-2022": Fit(1.69, 406.4, 410.7, 0.34, 0.28),
    # the same fit with the digits of the paper's TeX source, as quoted by Besiroglu et al. 2024
    "hoffmann-2022-unrounded": Fit(1.6934, 406.4, 410.7, 0.3392, 0.2849),
}


class Optimum(NamedTuple):
    """The best use of one budget, by one fit."""

    params: float
    tokens: float
    loss: float

    @property
    def compute(self) -> float:
        """Operations of the training, 6 N D. It leaves attention out; `models.flops` counts it."""
        return FLOPS_PER_PARAMETER_AND_TOKEN * self.params * self.tokens

    @property
    def tokens_per_param(self) -> float:
        return self.tokens / self.params


def optimum(
    *,
    compute: float | None = None,
    params: float | None = None,
    tokens: float | None = None,
    fit: Fit = FITS["besiroglu-2024"],
) -> Optimum:
    """The model and data that give the least loss: for a budget, or whose best size or data is the one given.

    With S = alpha + beta and G = (alpha A / beta B)^(1/S), the best N for C is G (C/6)^(beta/S), the best D
    (C/6)^(alpha/S) / G. Exactly one of `compute`, `params` and `tokens` is given.
    """
    if sum(given is not None for given in (compute, params, tokens)) != 1:
        raise ValueError("give one of compute, params and tokens")
    total = fit.alpha + fit.beta
    scale = (fit.alpha * fit.a / (fit.beta * fit.b)) ** (1 / total)
    if params is not None:
        tokens = (params / scale) ** (total / fit.beta) / params
    elif tokens is not None:
        params = (tokens * scale) ** (total / fit.alpha) / tokens
    else:
        assert compute is not None
        params = scale * (compute / FLOPS_PER_PARAMETER_AND_TOKEN) ** (fit.beta / total)
        tokens = compute / FLOPS_PER_PARAMETER_AND_TOKEN / params
    return Optimum(params, tokens, fit.loss(params, tokens))


def gpu_hours(compute: float, device: Device, mfu: float) -> float:
    """Hours of one device for that many operations, at `mfu` of its dense 16-bit peak."""
    return compute / (half_peak(device) * mfu) / 3600


def half_peak(device: Device) -> float:
    """Dense FLOP/s in bfloat16, or in float16 where there is no bfloat16. Raises `BadInput`."""
    for dtype in ("bfloat16", "float16"):
        if dtype in device.peak_flops:
            return device.peak_flops[dtype]
    raise BadInput([Problem("--device", f"'{device.name}' has no 16-bit matrix rate", "Choose another.")])


def device_named(name: str) -> Device:
    """The device of the table with this name, or the first of a family: H100 is the H100 SXM."""
    family = (device for device in DEVICES if device.name.lower().split(" ")[0] == name.lower())
    if found := find_device(name) or next(family, None):
        return found
    hint = did_you_mean(name, [device.name for device in DEVICES])
    raise BadInput([Problem("--device", f"'{name}' is not known", hint)])


_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15}


def quantity(key: str, text: str) -> float:
    """A positive number as people write it: 70e9, 70B, 1.4T, 1_000. Raises `BadInput` that names `key`."""
    value = math.nan
    if found := re.fullmatch(r"([0-9._,]+(?:[eE][+-]?[0-9]+)?)\s*([kKmMbBgGtTpP]?)", text.strip()):
        with suppress(ValueError):
            value = float(found[1].replace(",", "").replace("_", "")) * _SUFFIXES[found[2].upper()]
    if not 0 < value < math.inf:
        hint = "Write a number above 0, as 70e9, 70B or 1.4T (K, M, B, T, P)."
        raise BadInput([Problem(key, f"'{text}' is not a quantity", hint)])
    return value
