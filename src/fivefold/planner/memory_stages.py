"""Which ranks of a pipeline to look at, and how many micro-batches each of them has in flight.

The fullest rank of a pipeline is one of a few: the first (the embedding, and the most micro-batches in
flight), the second, the first of those with the most layers, the one with the head, and the last. Only those
are computed, so that a search over many layouts stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fivefold.axes.pieces import Part, PartSize
from fivefold.axes.schedules import V_SHAPED, compute_order, fewest_micro_batches
from fivefold.ledger.setup import Number, Setup
from fivefold.ledger.spread import spread
from fivefold.planner.placement import Cut, on_ranks

LOOKED_AT = ("first", "second", "longest", "head", "last")


@dataclass(frozen=True)
class Rank:
    """One rank of each of many layouts; the fields of `placement.Load`, and

    number       its position along pp
    stages       how many stages it holds
    in_flight    the most (stage, micro-batch) pairs whose activations it keeps at once
    heads_kept   of how many micro-batches it keeps the head's activations
    waiting      how many of them are between the gradients of their inputs and those of their weights
    """

    name: str
    number: Number
    layers: Number
    embedding: Number
    head: Number
    loss: Number
    stages: Number
    in_flight: Number
    heads_kept: Number
    waiting: Number

    def size(self, parts: dict[Part, PartSize]) -> PartSize:
        """What it holds of the parameters, given what a rank has of each part."""
        ends = parts["embedding"].times(self.embedding) + parts["head"].times(self.head)
        return parts["block"].times(self.layers) + ends


def looked_at(setup: Setup, cut: Cut) -> tuple[Rank, ...]:
    """The ranks of `LOOKED_AT`, for every layout of the setup."""

    def chosen(pp: int, virtual: int, count: int) -> list[tuple[int, ...]]:
        return _loads(setup, cut, pp, virtual, count)

    ranks = spread(chosen, setup.pp, setup.virtual_stages, setup.micro_batches)
    return tuple(Rank(name, *fields) for name, fields in zip(LOOKED_AT, ranks, strict=True))


def _loads(setup: Setup, cut: Cut, pp: int, virtual: int, count: int) -> list[tuple[int, ...]]:
    loads = on_ranks(setup, cut, pp, virtual)
    most = max(load.layers for load in loads)
    middle = range(1, pp - 1) or range(pp)
    chosen = (
        0,
        min(1, pp - 1),
        next((rank for rank in middle if loads[rank].layers == most), middle[0]),
        next(rank for rank in range(pp) if loads[rank].head),
        pp - 1,
    )
    stages = 1 if pp == 1 else virtual
    schedule = setup.schedule if pp > 1 else ""
    return [
        (
            rank,
            *loads[rank],
            stages,
            in_flight(schedule, rank, pp, count, stages),
            heads_kept(schedule, pp, count) if loads[rank].head or loads[rank].loss else 0,
            waiting(schedule, rank, pp, count, stages),
        )
        for rank in chosen
    ]


# --- micro-batches in flight -----------------------------------------------------------------------------


def in_flight(schedule: str, rank: int, ranks: int, count: int, virtual: int) -> int:
    """The most (stage, micro-batch) pairs whose activations a rank keeps, until their weights' gradients."""
    if schedule in ("", "naive"):
        return 1
    total = count * virtual
    per_round = count // max(1, count // ranks)
    behind = ranks - 1 - rank
    if schedule in V_SHAPED:
        return _counted(schedule, rank, ranks, min(count, 4 * ranks))[0]
    kept = {
        "gpipe": total,
        "looped-bfs": total,
        "1f1b": behind + 1,
        "interleaved": (virtual - 1) * per_round + 2 * behind + 1,
        "zero-bubble": (virtual - 1) * per_round + behind + 1 + rank,
        "zb-h1": ranks,
        "zb-1p": ranks,
        "zb-h2": 2 * ranks - 1,
        "zb-2p": 2 * ranks - 1,
    }[schedule]
    return min(kept, total)


def heads_kept(schedule: str, ranks: int, count: int) -> int:
    """Of how many micro-batches the head's activations are kept: all where backward starts after the last."""
    return count if schedule in ("gpipe", "looped-bfs") else 1


def waiting(schedule: str, rank: int, ranks: int, count: int, virtual: int) -> int:
    """Of the pairs in flight, how many have gradients of their inputs but not of their weights."""
    if schedule in V_SHAPED:
        return _counted(schedule, rank, ranks, min(count, 4 * ranks))[1]
    late = {"zero-bubble": rank + 1, "zb-h1": rank + 1, "zb-h2": 2 * rank + 1}.get(schedule, 0)
    return min(late, count * virtual)


@lru_cache(maxsize=4096)
def _counted(schedule: str, rank: int, ranks: int, count: int) -> tuple[int, int]:
    """Kept and waiting, counted in the schedule itself; a longer step than four rounds changes nothing."""
    count = max(count, fewest_micro_batches(schedule, ranks))
    order = compute_order(schedule, rank, ranks, count, 2)
    return most_kept(order), most_waiting(order)


def most_waiting(order: list[Any]) -> int:
    """How many of them are between the two halves of their backward at the fullest moment.

    There a pair that waits counts twice; what that makes more than the most kept is the answer.
    """
    kept = half_done = fullest = 0
    for action in order:
        kept += action.kind == "forward"
        half_done += action.kind == "backward-input"
        fullest = max(fullest, kept + half_done)
        kept -= action.kind in ("backward", "backward-weight")
        half_done -= action.kind == "backward-weight"
    return fullest - most_kept(order)


def most_kept(order: list[Any]) -> int:
    """The most pairs between their forward and their weights' gradients, in a rank's list of actions."""
    now = most = 0
    for action in order:
        now += action.kind == "forward"
        most = max(most, now)
        now -= action.kind in ("backward", "backward-weight")
    return most
