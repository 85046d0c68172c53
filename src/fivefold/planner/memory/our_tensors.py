"""Tensors of a rank under our own program, played: its moments, and what is alive at each of them.

What a part of the model keeps and needs is replayed (`replay/activations.py`); what a rank keeps, and when,
is walked through in the order of its actions (`moments.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache, partial, reduce
from typing import Any

import numpy as np

from fivefold.axes.data import residual_bytes
from fivefold.axes.muon import even_bytes
from fivefold.axes.pieces import PartSize, narrow_gradients
from fivefold.hardware.devices import DeviceKind
from fivefold.ledger.offload import buffer_bytes, host_bytes
from fivefold.ledger.setup import Figure, Setup
from fivefold.planner.memory.known_activations import NUMBERS
from fivefold.planner.memory.moments import KINDS, moments
from fivefold.planner.memory.rank_memory import RankMemory, looked_at
from fivefold.planner.memory.stage import Sizes, Stage
from fivefold.planner.placement import Load, on_ranks
from fivefold.planner.placement import ours as our_cut
from fivefold.planner.play.arrays import taken

Chosen = Callable[[Sequence[Load]], Sequence[int]]
"""Given what each rank of a pipeline holds: the ranks that are played."""


def ours(setup: Setup, device: DeviceKind = "cuda") -> list[RankMemory]:
    """The tensors of the ranks of `LOOKED_AT`, for every layout of the setup."""
    return _tensors(setup, device, looked_at)


def rank_tensors(setup: Setup, rank: int, device: DeviceKind = "cuda") -> RankMemory:
    """The tensors of one rank of the pipeline."""
    return _tensors(setup, device, lambda loads: [rank])[0]


def _tensors(setup: Setup, device: DeviceKind, chosen: Chosen) -> list[RankMemory]:
    numbers = [getattr(setup, name) for name in NUMBERS]
    one = not any(isinstance(number, np.ndarray) for number in numbers)
    every: Any = dict(zip(NUMBERS, np.broadcast_arrays(*map(np.atleast_1d, numbers)), strict=True))
    many = replace(setup, **every)
    orders = np.stack([many.pp, many.virtual_stages, many.micro_batches], axis=-1)
    distinct, where = np.unique(orders, axis=0, return_inverse=True)
    rows = [np.flatnonzero(where.reshape(-1) == number) for number in range(len(distinct))]
    played = [
        _played(taken(many, some), device, chosen, pp, virtual if pp > 1 else 1, count)
        for some, (pp, virtual, count) in zip(rows, distinct.tolist(), strict=True)
    ]
    figures = np.concatenate(played, axis=-1)[..., np.argsort(np.concatenate(rows))]
    return [RankMemory(*(column.item() if one else column for column in rank)) for rank in figures]


def _played(setup: Setup, device: DeviceKind, chosen: Chosen, pp: int, virtual: int, count: int) -> Any:
    """[ranks, fields of `RankMemory`, layouts] of layouts that share an order."""
    stage = cache(partial(Stage, setup, Sizes.of(setup, device)))
    ranks = chosen(on_ranks(setup, our_cut, pp, virtual))
    found = {rank: _rank(setup, device, stage, rank, pp, virtual, count) for rank in set(ranks)}
    return np.stack([found[rank] for rank in ranks])


def _rank(
    setup: Setup,
    device: DeviceKind,
    stage: Callable[[Load, bool, bool], Stage],
    rank: int,
    pp: int,
    virtual: int,
    count: int,
) -> Any:
    """[fields of `RankMemory`, layouts] at the fullest moment of one rank."""
    when = moments(setup.schedule, pp, rank, count, virtual, setup.splits_backward)
    loads, mine = our_cut(setup, pp * virtual), when.stages
    stages = [stage(loads[number], number + 1 in mine, number == mine[0] > 0) for number in mine]
    layouts = len(np.asarray(setup.tp))

    def each(name: str) -> Any:
        """[stages, layouts] of a figure of the stages."""
        return np.stack([np.broadcast_to(getattr(stage, name), layouts) for stage in stages]).astype(float)

    def needs(kind: int, place: int, first: int, last: int, stays: int) -> Any:
        gathered = stays and setup.frees_weights
        return np.broadcast_to(stages[place].needs(KINDS[kind], first, last, gathered), layouts)

    kept = when.live @ each("saved") + when.half @ each("halved")
    others = (
        np.stack([needs(*key) for key in when.passes.tolist()])[when.next]
        + when.sums @ each("sums")
        + when.shards @ each("shards")
        + (1 - when.shards * bool(setup.zero)) @ each("weights")
        + when.stays @ each("stays")
    )
    weights, gradients = each("weights").sum(axis=0), each("shards").sum(axis=0)
    most = kept.max(axis=0)
    held = reduce(PartSize.__add__, (stage.size for stage in stages))
    # At the end gradients that tp ranks have in part are put together, and summed.
    end = gradients + (0 if setup.zero else weights) + 2 * held.partial * setup.precision.reduce_bytes
    # Then matrices are orthogonalised; torch's AdamW, which is a CPU's, has gradients widened.
    layers = sum(loads[number].layers for number in mine)
    narrower = setup.precision.reduce_bytes - setup.precision.compute_bytes
    torchs = device == "cpu" and setup.states == "fp32" and not setup.offload
    update = gradients + torchs * narrower * narrow_gradients(setup, held)
    update = update + (0 if setup.zero else weights) + even_bytes(setup.replica, layers)
    update = update + buffer_bytes(setup, held.updated)
    fullest = np.maximum(np.maximum((kept + others).max(axis=0), end), update)
    rest = fullest - most - weights - gradients
    found = RankMemory(
        number=rank,
        weights=weights,
        gradients=gradients,
        states=states(setup, held) + (on_host(setup, held) if device == "cpu" else 0.0),
        host=0.0 if device == "cpu" else on_host(setup, held),
        activations=most + count * each("receives").sum(axis=0),
        transient=np.maximum(rest, 0),
        spared=np.maximum(-rest, 0),
    )
    return np.stack([np.broadcast_to(getattr(found, field.name), layouts) for field in fields(found)])


def states(setup: Setup, held: PartSize) -> Figure:
    """Master weights where they are a copy of their own, moments, averaged weights, counters, residuals.

    And what outer steps keep: where there are any, no gradient is compressed. All of it on the device.
    """
    moments = setup.moment_bytes(held.updated, held.matrices) + setup.outer_bytes(held.updated)
    counters = setup.counter_bytes(held.tensors, held.matrix_tensors)
    kept = moments + counters + residual_bytes(setup.replica, held)
    return setup.master_bytes(held.shard) + kept - on_host(setup, held)


def on_host(setup: Setup, held: PartSize) -> Figure:
    """What lies in the host's memory in place of the device's."""
    return host_bytes(setup, held.updated, held.tensors)
