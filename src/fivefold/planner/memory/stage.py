"""One stage of a rank: what it holds and keeps, and what each pass through it needs.

A pass is walked through part by part. Blocks are alike, so that what is alive grows or shrinks evenly from
one to the next: only those at the ends are looked at. Around the parts FSDP gathers weights and reduces
gradients, as torch's `fully_shard` does. Every figure is of many layouts at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from fivefold.axes.pieces import Part, PartSize
from fivefold.ledger.numbers import divided_up
from fivefold.ledger.setup import Figure, Setup, segment_length
from fivefold.planner.placement import Load
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


class Spot(NamedTuple):
    """What one stage holds, and where it is: stages that are equal in this are alike.

    hands_on  the next stage is on the same rank
    waits     it is the first of its rank, and not the first of all
    """

    load: Load
    first: bool
    last: bool
    hands_on: bool
    waits: bool

    @classmethod
    def of(cls, number: int, mine: Sequence[int], loads: Sequence[Load]) -> Spot:
        """Stage `number` on a rank that has the stages `mine`."""
        last = number == len(loads) - 1
        return cls(loads[number], number == 0, last, number + 1 in mine, number == mine[0] > 0)


class Walk:
    """What is alive beyond what was there before a pass, and the most that ever is."""

    def __init__(self) -> None:
        self.now: Figure = 0.0
        self.most: Figure = 0.0

    def reach(self, more: Figure = 0.0) -> None:
        """For a moment there is `more` than now."""
        self.most = np.maximum(self.most, self.now + more)


class Stage:
    """Bytes of one stage of a rank.

    saved     of a micro-batch from forward to backward; `halved`: what comes to it between backward's halves
    sums      gradients as they add up; `shards`: reduced
    weights   as they compute, where they are held for the step
    stays     weights of the head, where they stay gathered from forward to backward
    fetched   weights of the last part, where backward of a later pass has begun to gather them
    receives  tensors that a micro-batch is received into, there from one step to the next
    """

    def __init__(self, setup: Setup, sizes: Sizes, spot: Spot):
        load, first, last, hands_on, self.waits = spot
        self.setup, self.sizes, self.load = setup, sizes, load
        self.mixed = setup.precision.mixed
        self.compute, self.reduced = setup.precision.compute_bytes, setup.precision.reduce_bytes
        parts, kept, stream = sizes.parts, sizes.kept, sizes.stream
        held: dict[Part, int] = {"embedding": load.embedding, "block": load.layers, "head": load.head}
        self.counts = {part: count for part, count in held.items() if count}
        ends = parts["embedding"].times(load.embedding) + parts["head"].times(load.head)
        self.size = parts["block"].times(load.layers) + ends
        self.length = segment_length(setup.recompute, load.layers)
        self.segments = load.layers if self.length is None else int(divided_up(load.layers, self.length))
        self.blocks = self.segments * kept["block"].saved
        self.head = load.head * kept["head"].saved
        embedding = load.embedding * kept["embedding"].saved
        self.piped = not (first and last)
        # What a stage receives lies in a buffer; what it makes is kept until it goes backward.
        made = 0 if last or hands_on else stream
        received = 0 if first else kept["block"].input
        self.saved = embedding + self.blocks + self.head - received + made
        halves = load.layers * kept["block"].half_done + load.head * kept["head"].half_done
        self.halved = halves - self.blocks - self.head - (0 if last else stream)
        self.receives = ((not first) + (not last)) * stream if self.piped else 0.0
        self.sharded, self.frees = setup.zero > 0, setup.frees_weights
        self.shards = (self.size.shard if self.sharded else self.size.whole) * self.reduced
        # What is reduced for every micro-batch adds up in shards.
        self.always = bool(np.all(setup.reduces_every_micro_batch))
        self.sums = self.shards if self.always else self.size.whole * self.reduced
        # Without stages a tied model's ends share a weight, and are one unit, which stays gathered.
        self.ends_are_one = setup.spec.tied and not self.piped
        weights = self.size.padded if self.sharded else self.size.whole
        if self.frees:
            weights = ends.padded if self.ends_are_one else 0 * weights
        self.weights = weights * self.compute
        self.stays = load.head * self._unit("head") if self.frees and not self.ends_are_one else 0.0
        # Spread experts are gathered and reduced apart from their block.
        block = parts["block"]
        self.own = (block.padded - block.apart) * self.compute
        self.fetched = 0.0 if load.head or not self.frees else self.own
        self.lonely = 1 * (setup.shard_ranks <= setup.ep)
        self.experts = block.apart * self.compute * (1 - self.lonely)
        self.message = np.where(np.asarray(block.apart) > 0, self.experts, self.own)
        self.early = self.piped and self.sharded and not self.frees
        self._known: dict[tuple[object, ...], Figure] = {}

    def _unit(self, part: Part) -> Figure:
        """Weights of a part, gathered."""
        return self.sizes.parts[part].padded * self.compute

    def needs(
        self, kind: str, first: bool, last: bool, stays: bool, fetched: bool, fetches: Stage | None
    ) -> Figure:
        """What a pass needs on top of what is kept, at its fullest moment.

        first    no gradients have been added up yet
        last     gradients are reduced in it
        stays    the head's weights are still gathered
        fetched  weights of the last part are already being gathered
        fetches  the stage of which it begins to gather the last part itself, at its end
        """
        if not self.frees:
            stays, fetched, fetches = False, False, None
        key = kind, first, last, stays, fetched, fetches
        if key not in self._known:
            self._known[key] = self._needs(*key)
        return self._known[key]

    def _needs(
        self, kind: str, first: bool, last: bool, stays: bool, fetched: bool, fetches: Stage | None
    ) -> Figure:
        if kind == "reduce":
            return self._reduce()
        if kind == "backward-input":
            return self._backward_input()
        if kind == "backward-weight":
            return self._backward_weight(first)
        walk = Walk()
        if kind == "forward":
            self._forward(walk, first, stays, fetched)
        else:
            walk.now = -fetched * self.fetched
            self._backward(walk, first, last, stays, 0.0 if fetches is None else fetches.fetched)
        return walk.most

    def _forward(self, walk: Walk, first: bool, stays: bool, fetched: bool) -> None:
        load, kept, stream = self.load, self.sizes.kept, self.sizes.stream
        gathers = self.sharded and not self.frees and not self.piped and first
        if gathers:
            walk.now = walk.now - self.weights
        output = 0.0 if stays or not load.head or self.ends_are_one else self._unit("head")
        for part, count in self.counts.items():
            if gathers:
                walk.now = walk.now + count * self._unit(part)
            if self.early and first and not self.waits:
                walk.reach(self._unit(part))
            if part == "block":
                walk.now = walk.now + self.blocks - kept[part].saved
            message: Figure = 0.0
            if self.frees:
                if part == "embedding":
                    message = self._unit(part) + (0.0 if self.ends_are_one else self._unit(part) + self.own)
                elif part == "head":
                    message = self.message if self.ends_are_one else 2 * output
                else:
                    # Each gathers the next one, unless that is the last and was fetched.
                    there = self.fetched if fetched else 0.0
                    ahead = [
                        output - there,
                        self.own - there - kept[part].saved,
                        self.own - 2 * kept[part].saved,
                    ]
                    message = self._unit(part) + self.message + reduce(np.maximum, ahead[:count])
            elif gathers:
                message = self.message if part == "block" or self.ends_are_one else self._unit(part)
            walk.reach(kept[part].forward_peak + message)
            walk.now = walk.now + kept[part].saved + (stream if part == "embedding" else 0.0)

    def _backward(self, walk: Walk, first: bool, last: bool, stays: bool, fetches: Figure) -> None:
        load, kept, stream = self.load, self.sizes.kept, self.sizes.stream
        block, embedding, head = kept["block"], kept["embedding"], kept["head"]
        # FSDP takes a unit's gradients when all are there; what is added to a sum in its own dtype is gone.
        stay = first or (self.sharded and (self.mixed or self.always))
        peak = "with_gradients" if stay else "backward_peak"
        reducing: Figure = 0.0
        tied = self.sizes.parts["embedding"].whole * self.compute
        if load.head:
            gathered = self.own + (0.0 if stays or self.ends_are_one else self._unit("head"))
            walk.reach(getattr(head, "with_gradients" if self.ends_are_one else peak) + self.frees * gathered)
            walk.now = walk.now - self.head - stays * self.stays
            if self.ends_are_one:  # the gradient of the shared weight waits for the embedding's part of it
                walk.now = walk.now + tied
            else:
                reducing = self._through(walk, "head", first, last)
        working, recomputing = self._block_backward(peak)
        incoming: Figure = stream if load.head else 0.0
        visited = min(self.segments, 4 if self.frees else 3)
        for number in range(visited):
            before = walk.now
            # The block before is gathered ahead, unless it is there to be recomputed as well.
            ahead = fetches if number == visited - 1 else self.own * ((self.length or 1) == 1)
            walk.reach(incoming + reducing + np.maximum(working + self.frees * ahead, recomputing))
            walk.now = walk.now - block.saved + stream
            reducing = self._through(walk, "block", first, last, load.layers / self.segments)
            walk.now = walk.now - stream
            if number == 1:
                walk.now = walk.now + (self.segments - visited) * (walk.now - before)
            incoming = stream
        if load.embedding:
            walk.reach(stream + getattr(embedding, peak) + reducing)
            walk.now = walk.now - embedding.saved
            if self.ends_are_one:
                walk.reach(2 * tied)
                walk.now = walk.now - tied
            self._through(walk, "embedding", first, last)

    def _block_backward(self, peak: str) -> tuple[Figure, Figure]:
        """What a block needs with its gathered weights; and when spread experts are gathered to recompute."""
        block, plain, length = self.sizes.kept["block"], self.sizes.plain, self.length or 1
        gathered = self.frees * length * self._unit("block")
        working = gathered + getattr(block, peak)
        if self.length is not None:
            working = np.maximum(
                working, gathered + length * plain.saved + getattr(plain, peak) - block.saved
            )
        spread = (self.length is not None) * (self.experts > 0)
        return working, spread * (plain.forward_peak + gathered + self.frees * self.experts)

    def _through(self, walk: Walk, part: Part, first: bool, last: bool, count: float = 1) -> Figure:
        """Backward is through with a part, or `count` of them: gradients are added up, or reduced.

        Returns the buffer that they were reduced in, which stays until the next one.
        """
        size, end = self.sizes.parts[part], part != "block"
        fresh, whole, shard = size.whole * self.compute, size.whole * self.reduced, size.shard * self.reduced
        if not (self.sharded and (last or self.always)):
            if first:  # cast one by one; an end has hardly more than one
                walk.reach(whole + (fresh if end and self.mixed else 0.0))
                walk.now = walk.now + count * whole
            return 0.0
        if last and not self.frees:
            walk.now = walk.now - count * self._unit(part)
        new = first or self.always
        walk.reach((fresh if new else 0.0) + self._buffer(part))
        kept = 0.0 if self.always and not first else shard
        walk.now = walk.now + count * (kept - (0.0 if new else whole))
        return (size.padded - size.apart) * self.reduced

    def _buffer(self, part: Part) -> Figure:
        """What a part's gradients are copied into, to be reduced.

        Torch still has a name for the last of them while it makes the shard: an end has hardly another.
        """
        size = self.sizes.parts[part]
        if part == "block":
            return np.maximum(size.padded - size.apart, size.apart * (1 + self.lonely)) * self.reduced
        small_last = part == "embedding" and self.setup.spec.positions == "learned"
        return (size.padded + (0 if small_last else size.shard)) * self.reduced

    def _backward_input(self) -> Figure:
        load, block, head = self.load, self.sizes.kept["block"], self.sizes.kept["head"]
        walk = Walk()
        if load.head:
            walk.reach(head.backward_peak)
            walk.now = head.half_done - self.head
        if load.layers:
            walk.reach(load.head * self.sizes.stream + block.backward_peak)
            walk.now = walk.now + (load.layers - 1) * (block.half_done - block.saved)
            walk.reach(self.sizes.stream + block.backward_peak)
        return np.maximum(walk.most, self.halved)

    def _backward_weight(self, first: bool) -> Figure:
        stay = first or not self.sharded or self.mixed
        walk, parts = Walk(), self.sizes.parts
        # A block's largest weight is about a third of it.
        largest = np.maximum(parts["block"].whole / 3, self.load.head * parts["head"].whole)
        walk.reach((self.size.whole if stay else largest) * self.compute)
        walk.now = -self.saved - self.halved
        if first:
            cast = self.load.head * parts["head"].whole * self.compute if self.mixed else 0.0
            walk.reach(self.sums + cast)
        return walk.most

    def _reduce(self) -> Figure:
        """Part after part: weights are freed, gradients copied together, and shards take their place."""
        walk = Walk()
        for part, count in self.counts.items():
            size, freed = self.sizes.parts[part], 0.0 if self.frees else self._unit(part)
            walk.reach(self._buffer(part) - freed)
            walk.now = walk.now + count * ((size.shard - size.whole) * self.reduced - freed)
        return walk.most if self.sharded else 0.0
