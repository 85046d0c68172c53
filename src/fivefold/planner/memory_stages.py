"""Which ranks of a pipeline to look at, what each of them holds, and how many micro-batches it has in flight.

The fullest rank of a pipeline is one of a few: the first (the embedding, and the most micro-batches in
flight), the second, the first of those with the most layers, the one with the head, and the last. Only those
are computed, so that a search over many layouts stays fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fivefold.axes.pipeline import layer_counts
from fivefold.axes.schedules import (
    V_SHAPED,
    compute_order,
    fewest_micro_batches,
    rank_of_stage,
    stages_on,
)
from fivefold.ledger.setup import Number, Setup
from fivefold.models.flops import flops_per_token
from fivefold.models.spec import ModelSpec
from fivefold.planner.memory_rest import distinct

LOOKED_AT = ("first", "second", "longest", "head", "last")


class Load(NamedTuple):
    """What one rank of a pipeline holds.

    number     its position along pp
    layers     blocks, over all its stages
    embedding, head, loss  how many of each, 0 or 1
    """

    number: int
    layers: int
    embedding: int
    head: int
    loss: int

    @property
    def idle(self) -> bool:
        return not (self.layers or self.embedding or self.head or self.loss)


@dataclass(frozen=True)
class Rank:
    """One rank of each of many layouts; the fields of `Load`, and

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


Placement = Callable[[Setup, int, int], list[Load]]
"""(setup, pp, virtual stages) -> the load of every rank."""


def looked_at(setup: Setup, placement: Placement) -> tuple[Rank, ...]:
    """The ranks of `LOOKED_AT`, for every layout of the setup."""
    numbers = [setup.pp, setup.virtual_stages, setup.micro_batches]
    if not any(isinstance(number, np.ndarray) for number in numbers):
        loads = _loads(setup, placement, *(int(number) for number in numbers))
        return tuple(_rank(name, load) for name, load in zip(LOOKED_AT, loads, strict=True))
    rows = np.stack([np.reshape(column, -1) for column in np.broadcast_arrays(*numbers)], axis=-1)
    firsts, where = distinct(rows)
    table = np.array([_loads(setup, placement, *map(int, rows[first])) for first in firsts])
    picked = table[where]  # [layout, rank, field]
    return tuple(_rank(name, picked[:, place].T) for place, name in enumerate(LOOKED_AT))


def _rank(name: str, fields: Any) -> Rank:
    return Rank(name, *fields)


def _loads(setup: Setup, placement: Placement, pp: int, virtual: int, count: int) -> list[tuple[int, ...]]:
    loads = placement(setup, pp, virtual)
    most = max(load.layers for load in loads)
    middle = loads[1:-1] or loads
    chosen = (
        loads[0],
        loads[min(1, pp - 1)],
        next((load for load in middle if load.layers == most), middle[0]),
        next(load for load in loads if load.head),
        loads[-1],
    )
    stages = 1 if pp == 1 else virtual
    schedule = setup.schedule if pp > 1 else ""
    return [
        (
            *load,
            stages,
            in_flight(schedule, load.number, pp, count, stages),
            heads_kept(schedule, pp, count) if load.head or load.loss else 0,
            waiting(schedule, load.number, pp, count, stages),
        )
        for load in chosen
    ]


# --- where layers are ------------------------------------------------------------------------------------


def ours(setup: Setup, pp: int, virtual: int) -> list[Load]:
    """As `axes/pipeline.py` cuts the model."""
    if pp == 1:
        return [Load(0, setup.spec.layers, 1, 1, 1)]
    schedule, stages = setup.schedule, pp * virtual
    counts = _our_layer_counts(setup.spec, setup.seq_len, stages)
    last = rank_of_stage(schedule, stages - 1, pp)
    return [
        Load(
            rank,
            sum(counts[stage] for stage in stages_on(schedule, rank, pp, virtual)),
            int(rank == 0),
            int(rank == last),
            int(rank == last),
        )
        for rank in range(pp)
    ]


@lru_cache(maxsize=256)
def _our_layer_counts(spec: ModelSpec, seq_len: int, stages: int) -> tuple[int, ...]:
    flops = flops_per_token(spec, seq_len)
    block = (flops.blocks + flops.attention) / spec.layers
    return tuple(layer_counts(spec.layers, stages, flops.head / block))


def evenly(setup: Setup, pp: int, virtual: int) -> list[Load]:
    """As Megatron does: as many layers on each rank.

    Where that makes the count divide, embedding and head count as a layer each; where nothing does, the early
    ranks have one more.
    """
    layers = setup.spec.layers
    ends = pp > 1 and layers % pp != 0 and (layers + 2) % pp == 0
    each, left = divmod(layers + 2 * ends, pp)
    counts = [each + (rank < left) - (ends and rank in (0, pp - 1)) for rank in range(pp)]
    v_shaped = setup.schedule in V_SHAPED
    if v_shaped and ends and pp > 1:  # the first rank has both ends
        counts[0], counts[-1] = each - 2, each
    last = 0 if v_shaped else pp - 1
    return [Load(n, count, int(n == 0), int(n == last), int(n == last)) for n, count in enumerate(counts)]


def by_cost(setup: Setup, pp: int, virtual: int) -> list[Load]:
    """As nanotron does (its models/base.py): a rank takes parts until their costs exceed its share.

    The embedding, the last norm, the cast of the logits and the loss cost nothing. A rank behind the loss may
    be left with nothing at all.
    """
    spec = setup.spec
    layer = 4 * spec.heads * spec.head_dim * spec.dim + 3 * spec.ffn * spec.dim
    parts = [("embedding", 0), *[("layers", layer)] * spec.layers, ("norm", 0)]
    parts += [("head", spec.vocab_size * spec.dim), ("cast", 0), ("loss", 0)]
    total = sum(cost for _, cost in parts)
    held = [dict.fromkeys(("layers", "embedding", "head", "loss", "norm", "cast"), 0) for _ in range(pp)]
    rank = done = 0
    for part, cost in parts:
        held[rank][part] += 1
        done += cost
        rank += done > total * ((rank + 1) / pp)
    return [
        Load(n, found["layers"], found["embedding"], found["head"], max(found["loss"], found["cast"]))
        for n, found in enumerate(held)
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
