"""How many layers the ranks of a pipeline hold: as our pipeline axis cuts them, or as other stacks do."""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold.axes.pipeline import layer_counts
from fivefold.axes.schedules import V_SHAPED
from fivefold.ledger.setup import Setup
from fivefold.models.flops import flops_per_token
from fivefold.planner.profiles import Stack


def rank_layers(setup: Setup, stack: Stack) -> tuple[Any, Any, Any]:
    """Layers of the pipeline's first rank, of any between (the most), and of the last.

    Without a pipeline the first has them all. Arrays over many layouts, or plain numbers.
    """
    pairs = np.stack(np.broadcast_arrays(setup.pp, setup.virtual_stages), axis=-1)
    distinct, inverse = np.unique(pairs.reshape(-1, 2), axis=0, return_inverse=True)
    table = np.array([_on_ranks(setup, stack, int(pp), int(rounds)) for pp, rounds in distinct])
    found = table[inverse.reshape(pairs.shape[:-1])]
    return found[..., 0], found[..., 1], found[..., 2]


def _on_ranks(setup: Setup, stack: Stack, pp: int, rounds: int) -> tuple[int, int, int]:
    counts = np.array(stage_counts(setup, stack, pp * rounds))
    if pp > 1 and setup.schedule in V_SHAPED:
        ranks = counts[:pp] + counts[pp:][::-1]
    else:
        ranks = counts.reshape(rounds, pp).sum(axis=0)
    return ranks[0], max(ranks[1:-1], default=0), ranks[-1] if pp > 1 else 0


def stage_counts(setup: Setup, stack: Stack, stages: int) -> list[int]:
    """How many layers each stage has, in order.

    Stacks that do not balance give every stage the same, and let the first and the last have one less where
    that comes out even. Some allow more stages than layers: the first ones are empty.
    """
    layers = setup.spec.layers
    if stages == 1:
        return [layers]
    if stack.balanced and stages <= layers:
        flops = flops_per_token(setup.spec, setup.seq_len)
        return layer_counts(layers, stages, flops.head * layers / (flops.blocks + flops.attention))
    if (layers + 2) % stages == 0 and layers % stages:
        each = (layers + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    short, longer = divmod(layers, stages)
    return [short + (stage >= stages - longer) for stage in range(stages)]
