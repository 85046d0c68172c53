"""Activations of each part of the model, of many layouts, each combination of shapes replayed once."""

from dataclasses import astuple, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fivefold.axes.pieces import Part
from fivefold.ledger.numbers import Known, Rows
from fivefold.ledger.setup import Setup
from fivefold.replay.activations import (
    Activations,
    block_activations,
    embedding_activations,
    head_activations,
)
from fivefold.replay.compiled import compiled
from fivefold.replay.sizes import SHAPES

NUMBERS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "micro_batch", "virtual_stages")
"""All numbers of a layout."""
PARTS = {"block": block_activations, "embedding": embedding_activations, "head": head_activations}


def of_one(setup: Setup, **changes: Any) -> Setup:
    """What the layouts of a setup have in common: all their numbers are 1."""
    return replace(setup, **dict.fromkeys(NUMBERS, 1) | changes)


def activations(part: Part, setup: Setup, device: str) -> Activations:
    """Of every layout of the setup, on devices of torch's name "cuda" or "cpu"."""
    zero = 1 * setup.gathers_in_8_bits  # of which layers know no more
    kind = of_one(setup, global_batch=1, zero=zero, schedule="", compile=False)
    if part != "block":  # what is neither recomputed nor attends
        kind = replace(kind, recompute="none", cp_kind="")
    eager = Activations(*_known(part, kind, device)(*(getattr(setup, name) for name in SHAPES)))
    return compiled(part, eager, setup) if setup.compile and device == "cuda" else eager


@lru_cache(maxsize=256)
def _known(part: Part, kind: Setup, device: str) -> Known:
    """What was replayed so far of a part, for this model, length, precision and recomputation."""

    def figures(rows: Rows) -> Any:
        given: Any = dict(zip(SHAPES, rows.T, strict=True))
        return np.stack(astuple(PARTS[part](replace(kind, **given), device)), axis=-1)

    return Known(figures)
