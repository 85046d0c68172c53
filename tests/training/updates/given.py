"""The same gradients for every layout, and settings that move weights by them."""

from __future__ import annotations

from typing import Any

import torch

from fivefold.axes.runtime.data_split import local_slab
from fivefold.training.build import Built

RATES = (1e-2, 3e-2, 1e-3, 2e-2)
ADAMW: dict[str, Any] = {"betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.3}
STATES = ADAMW | {"states": "bf16"}
CODES = ADAMW | {"states": "int8"}
MUON = ADAMW | {"name": "muon", "momentum": 0.9}


def gradient_of(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * step)
    return torch.randn(shape, generator=generator)


def give_gradients(built: Built, step: int) -> None:
    """To each rank its part of the same gradients."""
    weights = built.weights
    for name, parameter, master in zip(weights.names, weights.parameters, weights.masters, strict=True):
        offset, shape = local_slab(parameter)
        whole = gradient_of(name, parameter.shape, step)
        slab = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        master.grad = whole[slab].contiguous().to(master.dtype)
