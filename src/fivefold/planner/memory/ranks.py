"""Which ranks of a pipeline to look at, and how many micro-batches each of them has in flight.

The fullest rank of a pipeline is one of a few: the first (the embedding, and the most micro-batches in
flight), the second, the first of those with the most layers, the one with the head, and the last. Only those
are computed, so that a search over many layouts stays fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fivefold.axes.pieces import Part, PartSize
from fivefold.ledger.numbers import spread
from fivefold.ledger.setup import Number, Setup
from fivefold.planner.placement import Cut, Load, on_ranks
from fivefold.schedules import ALONE

LOOKED_AT = ("first", "longest", "second", "head", "last")
"""Of ranks that are equally full, the one that comes first here counts as the fullest."""


@dataclass(frozen=True)
class Rank:
    """One rank of each of many layouts; the fields of `placement.Load`, and

    number       its position along pp
    stages       how many stages it holds
    in_flight    the most (stage, micro-batch) pairs whose activations it keeps at once
    waiting      how many of them are between the gradients of their inputs and those of their weights
    heads_kept   of how many micro-batches it keeps the head's activations
    """

    number: Number
    layers: Number
    embedding: Number
    head: Number
    loss: Number
    stages: Number
    in_flight: Number
    waiting: Number
    heads_kept: Number

    def size(self, parts: dict[Part, PartSize]) -> PartSize:
        """What it holds of the parameters, given what a rank has of each part."""
        ends = parts["embedding"].times(self.embedding) + parts["head"].times(self.head)
        return parts["block"].times(self.layers) + ends


def looked_at(loads: Sequence[Load]) -> tuple[int, ...]:
    """Which ranks those of `LOOKED_AT` are, given what each rank holds."""
    most, middle = max(load.layers for load in loads), range(1, len(loads) - 1) or range(len(loads))
    return (
        0,
        next((rank for rank in middle if loads[rank].layers == most), middle[0]),
        min(1, len(loads) - 1),
        next(rank for rank, load in enumerate(loads) if load.head),
        len(loads) - 1,
    )


def ranks_in_flight(setup: Setup, cut: Cut) -> tuple[Rank, ...]:
    """The ranks of `LOOKED_AT`, for every layout of the setup."""
    numbers = setup.pp, setup.virtual_stages, setup.micro_batches
    return tuple(Rank(*fields) for fields in spread(partial(_loads, setup, cut), *numbers))


def _loads(setup: Setup, cut: Cut, pp: int, virtual: int, count: int) -> list[tuple[int, ...]]:
    loads = on_ranks(setup, cut, pp, virtual)
    stages = 1 if pp == 1 else virtual
    schedule = setup.pipeline if pp > 1 else ALONE
    return [
        (
            rank,
            *loads[rank],
            stages,
            *schedule.kept(rank, pp, count, stages),
            schedule.heads_kept(count) if loads[rank].head or loads[rank].loss else 0,
        )
        for rank in looked_at(loads)
    ]
