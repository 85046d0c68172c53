"""How many layers the stages and ranks of a pipeline compute, for the time model."""

from __future__ import annotations

from typing import Any

from fivefold.ledger.setup import Setup
from fivefold.ledger.spread import spread
from fivefold.planner.placement import on_ranks
from fivefold.planner.time.stack import Stack


def rank_layers(setup: Setup, stack: Stack) -> tuple[Any, Any, Any]:
    """Layers of the pipeline's first rank, of any between (the most), and of the last.

    Without a pipeline the first has them all. Arrays over many layouts, or plain numbers.
    """
    first, between, last = spread(
        lambda pp, virtual: _on_ranks(setup, stack, pp, virtual), setup.pp, setup.virtual_stages
    )
    return first, between, last


def _on_ranks(setup: Setup, stack: Stack, pp: int, virtual: int) -> tuple[int, int, int]:
    loads = on_ranks(setup, stack.cut, pp, virtual)
    ranks = [load.layers for load in loads]
    # A rank behind the one with the head has at most the loss, and computes nothing: the head's is the last.
    last = next(rank for rank, load in enumerate(loads) if load.head) or pp - 1
    return ranks[0], max(ranks[1:last], default=0), ranks[last] if pp > 1 else 0


def stage_counts(setup: Setup, stack: Stack, stages: int) -> list[int]:
    """How many layers each stage has, in order."""
    return [load.layers for load in stack.cut(setup, stages)]
