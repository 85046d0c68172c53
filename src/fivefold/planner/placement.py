"""Which parts of a model the stages and ranks of a pipeline hold: the ways in which programs cut it.

Both time and memory are of these stages; a stack (`time/stack.py`) says which cut is its own. Where layers
divide evenly, with or without counting both ends as a layer, all programs but ours and nanotron agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fivefold.axes.stages import stage_layers
from fivefold.ledger.setup import Setup


class Load(NamedTuple):
    """What one stage or one rank of a pipeline holds.

    layers     blocks
    embedding, head, loss  how many of each, 0 or 1
    """

    layers: int
    embedding: int
    head: int
    loss: int


Cut = Callable[[Setup, int], list[Load]]
"""(setup, stages) -> what each stage holds, in order."""


def on_ranks(setup: Setup, cut: Cut, pp: int, virtual: int) -> list[Load]:
    """What each rank of a pipeline holds, over all its stages."""
    if pp == 1:
        return cut(setup, 1)
    held = cut(setup, pp * virtual)
    mine = ([held[stage] for stage in setup.pipeline.stages_of(rank, pp, virtual)] for rank in range(pp))
    return [Load(*map(sum, zip(*stages, strict=True))) for stages in mine]


# --- the ways of cutting ---------------------------------------------------------------------------------


def ours(setup: Setup, stages: int) -> list[Load]:
    """As `axes/stages.py` does: the slowest stage is as fast as can be, the head counted."""
    return with_ends(stage_layers(setup.spec, setup.seq_len, stages))


def with_ends(counts: Sequence[int]) -> list[Load]:
    """Stages of so many layers, the embedding in the first, head and loss in the last."""
    last = len(counts) - 1
    return [
        Load(count, int(stage == 0), int(stage == last), int(stage == last))
        for stage, count in enumerate(counts)
    ]
