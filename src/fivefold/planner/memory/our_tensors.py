"""Tensors of a rank under our own program, played: its moments, and what is alive at each of them.

What a part of the model keeps and needs is replayed (`replay/activations.py`); what a rank keeps, and when,
is walked through in the order of its actions (`moments.py`). Inside a pass through a stage the fullest moment
is at one of its ends: blocks are alike, so that what is alive grows or shrinks evenly from one to the next.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import numpy as np

from fivefold.axes.pieces import PARTS, PartSize, part_sizes
from fivefold.hardware.devices import DeviceKind
from fivefold.ledger.setup import Figure, Setup
from fivefold.planner.memory.known_activations import NUMBERS, activations
from fivefold.planner.memory.moments import KINDS, Counts, moments
from fivefold.planner.memory.rank_memory import RankMemory
from fivefold.planner.memory.ranks import LOOKED_AT, looked_at
from fivefold.planner.memory.stage import Sizes, Spot, Stage
from fivefold.planner.placement import on_ranks
from fivefold.planner.placement import ours as our_cut
from fivefold.planner.play.arrays import taken


def ours(setup: Setup, device: DeviceKind = "cuda") -> list[RankMemory]:
    """The tensors of the ranks of `LOOKED_AT`, for every layout of the setup."""
    numbers = {name: getattr(setup, name) for name in NUMBERS}
    one = not any(isinstance(number, np.ndarray) for number in numbers.values())
    every: Any = dict(zip(numbers, np.broadcast_arrays(*map(np.atleast_1d, numbers.values())), strict=True))
    many = replace(setup, **every)
    orders = np.stack([many.pp, many.virtual_stages, many.micro_batches], axis=-1)
    distinct, where = np.unique(orders, axis=0, return_inverse=True)
    figures = np.zeros((len(LOOKED_AT), len(fields(RankMemory)), len(orders)))
    for number, (pp, virtual, count) in enumerate(distinct.tolist()):
        rows = np.flatnonzero(where.reshape(-1) == number)
        figures[..., rows] = _played(taken(many, rows), device, pp, virtual if pp > 1 else 1, count)
    return [RankMemory(*(column[0] if one else column for column in rank)) for rank in figures]


def rank_tensors(setup: Setup, rank: int, device: DeviceKind = "cuda") -> RankMemory:
    """The tensors of one rank of the pipeline, under one layout."""
    one: Any = {name: np.atleast_1d(getattr(setup, name)) for name in NUMBERS}
    pp, virtual, count = (int(n) for n in (setup.pp, setup.virtual_stages, setup.micro_batches))
    many = replace(setup, **one)
    figures = _rank(many, _sizes(many, device), rank, pp, virtual if pp > 1 else 1, count, {})
    return RankMemory(*figures[:, 0].tolist())


def _played(setup: Setup, device: DeviceKind, pp: int, virtual: int, count: int) -> Any:
    """[ranks of `LOOKED_AT`, fields of `RankMemory`, layouts] of layouts that share an order."""
    sizes, known = _sizes(setup, device), dict[Spot, Stage]()
    chosen = looked_at(on_ranks(setup, our_cut, pp, virtual))
    found = {rank: _rank(setup, sizes, rank, pp, virtual, count, known) for rank in set(chosen)}
    return np.stack([found[rank] for rank in chosen])


def _sizes(setup: Setup, device: DeviceKind) -> Sizes:
    split = setup.tp if setup.sequence_parallel else 1
    return Sizes(
        part_sizes(setup),
        {part: activations(part, setup, device) for part in PARTS},
        activations("block", replace(setup, recompute="none"), device),
        1.0 * setup.tokens * setup.spec.dim * setup.precision.compute_bytes / split,
    )


def _rank(
    setup: Setup, sizes: Sizes, rank: int, pp: int, virtual: int, count: int, known: dict[Spot, Stage]
) -> Any:
    """[fields of `RankMemory`, layouts] at the fullest moment of one rank."""
    mine = setup.pipeline.stages_of(rank, pp, virtual) if pp > 1 else [0]
    loads = our_cut(setup, pp * virtual)
    spots = [Spot.of(number, mine, loads) for number in mine]
    known |= {spot: Stage(setup, sizes, spot) for spot in set(spots) - known.keys()}
    stages = [known[spot] for spot in spots]
    when = moments(setup.schedule, pp, rank, count, virtual, setup.splits_backward)
    layouts = len(np.asarray(setup.tp))

    def alive(counts: Counts, sizes: Sequence[Figure]) -> Any:
        """[moments, layouts]"""
        return counts @ np.stack([np.broadcast_to(size, layouts) for size in sizes]).astype(float)

    def needs(kind: int, place: int, first: int, last: int, ahead: int, fetched: int, fetches: int) -> Any:
        flags = bool(first), bool(last), bool(ahead or fetched), bool(fetched)
        other = stages[fetches] if fetches >= 0 else None
        return np.broadcast_to(stages[place].needs(KINDS[kind], *flags, other), layouts)

    passes = [tuple(key) for key in when.passes.tolist()]
    needed = {key: needs(*key) for key in set(passes)}
    kept = alive(when.live, [stage.saved for stage in stages])
    kept = kept + alive(when.half, [stage.halved for stage in stages])
    others = alive(when.sums, [stage.sums for stage in stages])
    others = others + alive(when.shards, [stage.shards for stage in stages])
    others = others + alive(1 - when.shards * bool(setup.zero), [stage.weights for stage in stages])
    others = others + alive(when.ahead | when.fetched, [stage.stays for stage in stages])
    others = others + alive(when.fetched, [stage.fetched for stage in stages])
    others = others + np.stack([needed[key] for key in passes])
    received = count * sum(stage.receives for stage in stages)
    weights, gradients = sum(stage.weights for stage in stages), sum(stage.shards for stage in stages)
    most = kept.max(axis=0)
    held = reduce(PartSize.__add__, (stage.size for stage in stages))
    # At the end gradients that tp ranks have in part are put together, and summed.
    end = gradients + (0 if setup.zero else weights) + 2 * held.partial * setup.precision.reduce_bytes
    rest = np.maximum((kept + others).max(axis=0), end) - most - weights - gradients
    found = RankMemory(
        number=rank,
        weights=weights,
        gradients=gradients,
        states=states(setup, held),
        activations=most + received,
        transient=np.maximum(rest, 0),
        spared=np.maximum(-rest, 0),
    )
    return np.stack([np.broadcast_to(getattr(found, field.name), layouts) for field in fields(found)])


def states(setup: Setup, held: PartSize) -> Figure:
    """Master weights where they are a copy of their own, moments, averaged weights, step counters."""
    moments = setup.moment_bytes(held.updated)
    return setup.master_bytes(held.shard) + moments + setup.counter_bytes(held.tensors)
