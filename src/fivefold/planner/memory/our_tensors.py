"""Tensors of a rank under our own program, played: its moments, and what is alive at each of them.

What a part of the model keeps and needs is replayed (`replay/activations.py`); what a rank keeps, and when,
is walked through in the order of its actions (`moments.py`). Inside a pass through a stage the fullest moment
is at one of its ends: blocks are alike, so that what is alive grows or shrinks evenly from one to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from fivefold.axes.pieces import PARTS, Part, PartSize, part_sizes
from fivefold.hardware.devices import DeviceKind
from fivefold.ledger.numbers import divided_up
from fivefold.ledger.optimizer import counter_bytes, master_bytes, moment_bytes
from fivefold.ledger.recompute import segment_length
from fivefold.ledger.setup import Figure, Setup
from fivefold.planner.memory.known_activations import NUMBERS, activations
from fivefold.planner.memory.moments import KINDS, Counts, moments
from fivefold.planner.memory.rank_memory import RankMemory
from fivefold.planner.memory.ranks import LOOKED_AT, looked_at
from fivefold.planner.placement import Load, on_ranks
from fivefold.planner.placement import ours as our_cut
from fivefold.planner.play.arrays import taken
from fivefold.replay.activations import Activations


class Sizes(NamedTuple):
    """Of layouts that share an order: what a rank has of each part, and what a part keeps and needs.

    plain   of a block without recomputation
    stream  bytes of the residual stream
    """

    parts: dict[Part, PartSize]
    kept: dict[Part, Activations]
    plain: Activations
    stream: Figure


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


def _played(setup: Setup, device: DeviceKind, pp: int, virtual: int, count: int) -> Any:
    """[ranks of `LOOKED_AT`, fields of `RankMemory`, layouts] of layouts that share an order."""
    split = setup.tp if setup.sequence_parallel else 1
    sizes = Sizes(
        part_sizes(setup),
        {part: activations(part, setup, device) for part in PARTS},
        activations("block", replace(setup, recompute="none"), device),
        1.0 * setup.tokens * setup.spec.dim * setup.precision.compute_bytes / split,
    )
    chosen = looked_at(on_ranks(setup, our_cut, pp, virtual))
    known = {rank: _rank(setup, sizes, rank, pp, virtual, count) for rank in set(chosen)}
    return np.stack([known[rank] for rank in chosen])


def _rank(setup: Setup, sizes: Sizes, rank: int, pp: int, virtual: int, count: int) -> Any:
    """[fields of `RankMemory`, layouts] at the fullest moment of one rank."""
    mine = setup.pipeline.stages_of(rank, pp, virtual) if pp > 1 else [0]
    loads = our_cut(setup, pp * virtual)
    stages = [Stage(setup, sizes, loads[number], number, mine, len(loads)) for number in mine]
    when = moments(setup.schedule, pp, rank, count, virtual, setup.splits_backward)
    layouts = len(np.asarray(setup.tp))

    def alive(counts: Counts, sizes: Sequence[Figure]) -> Any:
        """[moments, layouts]"""
        return counts @ np.stack([np.broadcast_to(size, layouts) for size in sizes]).astype(float)

    needs = {
        key: np.broadcast_to(stages[key[1]].needs(KINDS[key[0]], bool(key[2]), bool(key[3])), layouts)
        for key in {*map(tuple, when.passes.tolist())}
    }
    kept = alive(when.live, [stage.saved for stage in stages])
    kept = kept + alive(when.half, [stage.halved for stage in stages])
    others = alive(when.sums, [stage.sums for stage in stages])
    others = others + alive(when.shards, [stage.shards for stage in stages])
    others = others + alive(1 - when.shards * bool(setup.zero), [stage.weights for stage in stages])
    others = others + np.stack([needs[tuple(key)] for key in when.passes.tolist()])
    received = count * sum(stage.receives for stage in stages)
    weights, gradients = sum(stage.weights for stage in stages), sum(stage.shards for stage in stages)
    most = kept.max(axis=0)
    rest = (kept + others).max(axis=0) - most - weights - gradients
    found = RankMemory(
        number=rank,
        weights=weights,
        gradients=gradients,
        states=states(setup, reduce(PartSize.__add__, (stage.size for stage in stages))),
        activations=most + received,
        transient=np.maximum(rest, 0),
        spared=np.maximum(-rest, 0),
    )
    return np.stack([np.broadcast_to(getattr(found, field.name), layouts) for field in fields(found)])


def states(setup: Setup, held: PartSize) -> Figure:
    """Master weights where they are a copy of their own, moments, averaged weights, step counters."""
    moments = moment_bytes(setup, held.updated)
    return master_bytes(setup, held.shard) + moments + counter_bytes(setup, held.tensors)


class Stage:
    """Bytes of one stage of a rank.

    saved    of a micro-batch from forward to backward; `halved`: what comes to it between backward's halves
    sums     gradients as they add up; `shards`: reduced
    weights  as they compute, where they are held
    receives  tensors that a micro-batch is received into, there from one step to the next
    """

    def __init__(self, setup: Setup, sizes: Sizes, load: Load, number: int, mine: list[int], stages: int):
        self.setup, self.sizes, self.load = setup, sizes, load
        parts, kept, stream = sizes.parts, sizes.kept, sizes.stream
        compute, reduced = setup.precision.compute_bytes, setup.precision.reduce_bytes
        ends = parts["embedding"].times(load.embedding) + parts["head"].times(load.head)
        self.size = parts["block"].times(load.layers) + ends
        self.length = segment_length(setup.recompute, load.layers)
        segments = load.layers if self.length is None else divided_up(load.layers, self.length)
        self.blocks = segments * kept["block"].saved
        self.head = load.head * kept["head"].saved
        embedding = load.embedding * kept["embedding"].saved
        first, last = number == 0, number == stages - 1
        piped = stages > 1
        # What a stage receives lies in a buffer; what it makes is kept until it goes backward.
        made = 0 if last or number + 1 in mine else stream
        self.saved = embedding + self.blocks + self.head - (0 if first else stream) + made
        self.halved = (
            load.layers * kept["block"].half_done
            - self.blocks
            + load.head * kept["head"].half_done
            - self.head
        )
        self.receives = ((not first) + (not last)) * stream if piped else 0.0
        sharded = setup.zero > 0
        self.shards = (self.size.shard if sharded else self.size.whole) * reduced
        # What is reduced for every micro-batch adds up in shards.
        self.always = bool(np.all(setup.reduces_every_micro_batch))
        self.sums = self.shards if self.always else self.size.whole * reduced
        held = self.size.padded if sharded else self.size.whole
        # Without stages a tied model's ends are one unit, which stays gathered for the step.
        self.ends_stay = sharded and setup.spec.tied and not piped
        if setup.frees_weights:
            held = ends.padded if self.ends_stay else 0 * held
        self.weights = held * compute

    def needs(self, kind: str, first: bool, last: bool) -> Figure:
        """What a pass needs on top of what is kept, at its fullest moment.

        first  no gradients have been added up yet
        last   gradients are reduced in it
        """
        if kind == "forward":
            return self._forward()
        if kind == "reduce":
            return self._reduce()
        return self._backward(kind, first, last)

    def _forward(self) -> Figure:
        load, kept, stream = self.load, self.sizes.kept, self.sizes.stream
        parts, compute = self.sizes.parts, self.setup.precision.compute_bytes
        embedding = load.embedding * kept["embedding"].saved
        through = embedding + self.blocks + stream
        gathered: Figure = 0.0
        output: Figure = 0.0
        if self.setup.zero:
            frees = self.setup.frees_weights
            gathered = (3 if frees else 1) * parts["block"].padded * compute
            buffer = parts["block" if self.ends_stay else "head"].padded
            output = ((parts["head"].padded if frees and not self.ends_stay else 0) + buffer) * compute
        moments = [
            load.embedding * kept["embedding"].forward_peak,
            through - kept["block"].saved + kept["block"].forward_peak + gathered,
            load.head * (through + kept["head"].forward_peak + output),
        ]
        return reduce(np.maximum, moments)

    def _backward(self, kind: str, first: bool, last: bool) -> Figure:
        setup, load, parts, kept = self.setup, self.load, self.sizes.parts, self.sizes.kept
        compute, reduced = setup.precision.compute_bytes, setup.precision.reduce_bytes
        block, embedding, head = kept["block"], kept["embedding"], kept["head"]
        stream = self.sizes.stream
        # FSDP takes a unit's gradients when all are there; what is added to a sum in its own dtype is gone.
        stay = setup.zero and (first or setup.precision.mixed)
        if kind == "backward-weight":
            fresh = (self.size.whole if stay or not setup.zero else parts["block"].whole) * compute
            return fresh + np.maximum(0, first * self.sums - self.saved - self.halved)
        peak = "with_gradients" if stay else "backward_peak"
        working = getattr(block, peak)
        if self.length is not None:
            again = self.length * self.sizes.plain.saved + getattr(self.sizes.plain, peak)
            working = np.maximum(working, again - block.saved)
        if kind == "backward-input":
            done = load.head * head.half_done - self.head
            growing = (load.layers - 1) * (block.half_done - block.saved)
            moments = [
                load.head * head.backward_peak,
                done + stream + block.backward_peak,
                done + growing + stream + block.backward_peak,
                self.halved,
            ]
            return reduce(np.maximum, moments)

        def grown(part: Part) -> Figure:
            """What gradients of a part that is through add to those before."""
            shard, whole = parts[part].shard * reduced, parts[part].whole * reduced
            freed = parts[part].padded * compute if last and setup.zero and not setup.frees_weights else 0
            if self.always:
                return first * shard - freed
            if last and setup.zero:
                return shard - (0 if first else whole) - freed
            return first * whole

        gathered: Figure = 0.0
        output: Figure = 0.0
        reducing: Figure = 0.0
        if setup.zero:
            if setup.frees_weights:
                whole = 0 if self.ends_stay else parts["head"].padded
                output = (whole + parts["block"].padded) * compute
                gathered = ((self.length or 1) + 1) * parts["block"].padded * compute
            if last or self.always:
                reducing = np.maximum(load.head * parts["head"].padded, parts["block"].padded) * reduced
        # The gradient of a tied weight waits for the embedding's part of it.
        waits = parts["embedding"].whole * compute if self.ends_stay else 0
        after = load.head * (grown("head") + waits) - self.head
        later = after + (load.layers - 1) * grown("block") - self.blocks + block.saved
        ends = after + load.layers * grown("block") - self.blocks
        reduces = last or self.always
        end = (
            parts["embedding"].whole * compute
            + (parts["embedding"].padded + parts["block"].padded) * reduced * reduces
        )
        moments = [
            load.head * (getattr(head, peak) + output),
            after + stream + working + gathered + reducing,
            later + stream + working + gathered + reducing,
            ends + load.embedding * (getattr(embedding, peak) + stream),
            ends + load.embedding * (grown("embedding") + end) - load.embedding * embedding.saved,
        ]
        return reduce(np.maximum, moments)

    def _reduce(self) -> Figure:
        """The buffer that a unit's gradients are copied into, of the first unit or of the last.

        Its weights are freed before.
        """
        setup, parts, load = self.setup, self.sizes.parts, self.load
        if not setup.zero:
            return 0.0
        block, embedding, head = (parts[part] for part in ("block", "embedding", "head"))
        reduced = setup.precision.reduce_bytes
        freed = 0 if setup.frees_weights else setup.precision.compute_bytes
        first = embedding if load.embedding else block
        done = block.times(load.layers) + embedding.times(load.embedding)
        before = (done.whole - done.shard) * reduced + done.padded * freed
        return np.maximum(
            first.padded * (reduced - freed), load.head * (head.padded * (reduced - freed) - before)
        )
