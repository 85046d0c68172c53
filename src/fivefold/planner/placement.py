"""Which parts of a model the stages and ranks of a pipeline hold.

Both time and memory are of these stages; a stack (`time/stack.py`) says which way of cutting is its own.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from fivefold.axes.stages import stage_layers
from fivefold.ledger.numbers import spread
from fivefold.ledger.setup import Number, Setup
from fivefold.schedules import schedule_named


class Load(NamedTuple):
    """How many of each part one stage or one rank of a pipeline holds."""

    layers: int
    embedding: int
    head: int
    loss: int


Cut = Callable[[Setup, int], Sequence[Load]]
"""(setup, stages) -> what each stage holds, in order."""


def on_ranks(setup: Setup, cut: Cut, pp: int, virtual: int) -> Sequence[Load]:
    """What each rank of a pipeline holds, over all its stages."""
    if pp == 1:
        return cut(setup, 1)
    return _summed(tuple(cut(setup, pp * virtual)), setup.schedule, pp)


@lru_cache(maxsize=4096)
def _summed(held: tuple[Load, ...], schedule: str, pp: int) -> Sequence[Load]:
    row = schedule_named(schedule)
    mine = ([held[stage] for stage in row.stages_of(rank, pp, len(held) // pp)] for rank in range(pp))
    return [Load(*map(sum, zip(*stages, strict=True))) for stages in mine]


def most_layers(setup: Setup, cut: Cut) -> Number:
    """Of the pipeline's rank that has the most; an array over many layouts, or a plain number."""

    def counted(pp: int, virtual: int) -> int:
        return max(load.layers for load in on_ranks(setup, cut, pp, virtual))

    found: Number = spread(counted, setup.pp, setup.virtual_stages)
    return found


def ours(setup: Setup, stages: int) -> Sequence[Load]:
    """As `axes/stages.py` does: the slowest stage is as fast as can be, the head counted."""
    return with_ends(stage_layers(setup.spec, setup.seq_len, stages))


def with_ends(counts: Sequence[int]) -> list[Load]:
    """Stages of so many layers, the embedding in the first, head and loss in the last."""
    loads = [Load(count, 0, 0, 0) for count in counts]
    loads[0] = loads[0]._replace(embedding=1)
    loads[-1] = loads[-1]._replace(head=1, loss=1)
    return loads
