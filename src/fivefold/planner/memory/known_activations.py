"""Activations of each part of the model, of many layouts, each combination of shapes replayed once."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fivefold.ledger.setup import Setup
from fivefold.ledger.spread import Known, Rows
from fivefold.replay.activations import (
    Activations,
    block_activations,
    embedding_activations,
    head_activations,
)

SHAPES = ("micro_batch", "cp", "tp", "ep")
"""Of a layout's numbers, those that the shapes of one rank's tensors are made of."""
NUMBERS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "micro_batch", "virtual_stages")
"""All numbers of a layout."""
PLAYS = {"block": block_activations, "embedding": embedding_activations, "head": head_activations}


@dataclass(frozen=True)
class Played:
    """Activations of each part; `plain` is a block without recomputation."""

    block: Activations
    plain: Activations
    embedding: Activations
    head: Activations


def played(setup: Setup, device: str) -> Played:
    """Of every layout of the setup, on devices of torch's name "cuda" or "cpu"."""
    ones: Any = dict.fromkeys(NUMBERS, 1)
    kind = replace(setup, **ones, global_batch=1, zero=0, schedule="")
    plain = replace(kind, recompute="none")
    ends = replace(plain, cp_kind="")

    def looked_up(part: str, of: Setup) -> Activations:
        return Activations(*_known(part, of, device)(*(getattr(setup, name) for name in SHAPES)))

    return Played(
        looked_up("block", kind),
        looked_up("block", plain),
        looked_up("embedding", ends),
        looked_up("head", ends),
    )


@lru_cache(maxsize=256)
def _known(part: str, kind: Setup, device: str) -> Known:
    """What was replayed so far of a part, for this model, length, precision and recomputation."""

    def figures(rows: Rows) -> Any:
        given: Any = dict(zip(SHAPES, rows.T, strict=True))
        return np.stack(astuple(PLAYS[part](replace(kind, **given), device)), axis=-1)

    return Known(figures)
