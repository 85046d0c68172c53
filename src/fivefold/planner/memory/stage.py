"""One stage of a rank: what it holds and keeps, and what each pass through it needs.

A pass is walked through part by part. Blocks are alike, so that what is alive grows or shrinks evenly from
one to the next: only those at the ends are looked at. Around the parts FSDP gathers weights and reduces
gradients, as torch's `fully_shard` does. Every figure is of many layouts at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, reduce
from typing import NamedTuple

import numpy as np

from fivefold.axes.pieces import Part, PartSize, gradient_bytes, narrow_gradients, part_sizes
from fivefold.hardware.devices import DeviceKind
from fivefold.ledger.precision import Precision
from fivefold.ledger.setup import Figure, Setup, segment_length
from fivefold.planner.memory.known_activations import activations
from fivefold.planner.placement import Load
from fivefold.replay.activations import Activations

Step = tuple[Figure, Figure]
"""Of a walk through a pass: what comes on top for a moment, and what stays of it, or has gone."""
UNSEEN = -math.inf
"""No moment to look at."""


def segments(recompute: str, layers: int) -> int:
    """In how many pieces a stage's layers keep something: those that are recomputed together are one."""
    return math.ceil(layers / (segment_length(recompute, layers) or 1))


def _sums(setup: Setup, size: PartSize) -> PartSize:
    """Bytes of gradients as they add up: whole, or in shards that are reduced."""
    whole, sums = gradient_bytes(setup, size), size.times(setup.precision.reduce_bytes)
    return replace(sums, whole=whole, shard=sums.shard if setup.zero else whole)


class Sizes(NamedTuple):
    """Of layouts that share an order: what a rank has of each part, and what a part keeps and needs.

    weights  bytes of a part in the compute dtype; `sums`: of its gradients, as they add up
    widened  bytes of whole gradients as backward makes them, of those that add up in another dtype
    plain    of a block without recomputation
    stream   bytes of the residual stream
    """

    parts: dict[Part, PartSize]
    weights: dict[Part, PartSize]
    sums: dict[Part, PartSize]
    widened: dict[Part, Figure]
    kept: dict[Part, Activations]
    plain: Activations
    stream: Figure

    @classmethod
    def of(cls, setup: Setup, device: DeviceKind) -> Sizes:
        parts, precision = part_sizes(setup), setup.precision
        wide = {part: size.whole - narrow_gradients(setup, size) for part, size in parts.items()}
        return cls(
            parts,
            {part: _in_compute_dtype(size, precision) for part, size in parts.items()},
            {part: _sums(setup, size) for part, size in parts.items()},
            {part: precision.mixed * precision.compute_bytes * size for part, size in wide.items()},
            {part: activations(part, setup, device) for part in parts},
            activations("block", replace(setup, recompute="none"), device),
            1.0 * setup.tokens * setup.spec.dim * precision.compute_bytes / setup.stream_split,
        )


def _in_compute_dtype(size: PartSize, precision: Precision) -> PartSize:
    """Bytes of a part; `padded`: of what is gathered of it, 8 bits included."""
    return replace(size.times(precision.compute_bytes), padded=size.gathered_bytes(precision))


class Stage:
    """Bytes of one stage of a rank.

    saved     of a micro-batch from forward to backward; `halved`: what comes to it between backward's halves
    sums      gradients as they add up; `shards`: reduced
    weights   as they compute, where they are held for the step
    stays     weights of the head, where they stay gathered from forward to backward
    receives  tensors that a micro-batch is received into, there from one step to the next
    """

    def __init__(self, setup: Setup, sizes: Sizes, load: Load, hands_on: bool, waits: bool):
        """
        hands_on  the next stage is on the same rank
        waits     it is the first of its rank, and not the first of all
        """
        parts, kept, stream = sizes.parts, sizes.kept, sizes.stream
        self.setup, self.sizes, self.load = setup, sizes, load
        held: dict[Part, int] = {"embedding": load.embedding, "block": load.layers, "head": load.head}
        self.counts = {part: count for part, count in held.items() if count}
        ends = parts["embedding"].times(load.embedding) + parts["head"].times(load.head)
        self.size = parts["block"].times(load.layers) + ends
        self.length = segment_length(setup.recompute, load.layers)
        self.segments = segments(setup.recompute, load.layers)

        self.blocks = self.segments * kept["block"].saved
        self.head = load.head * kept["head"].saved
        self.saved = load.embedding * kept["embedding"].saved + self.blocks + self.head
        if not load.embedding:  # what a stage receives lies in a buffer
            self.saved = self.saved - kept["block"].input
        if not load.head and not hands_on:  # what it makes is kept until it goes backward
            self.saved = self.saved + stream
        halves = load.layers * kept["block"].half_done + load.head * kept["head"].half_done
        self.halved = halves - self.blocks - self.head - (0 if load.head else stream)
        self.receives = ((not load.embedding) + (not load.head)) * stream

        self.mixed, self.sharded, self.frees = setup.precision.mixed, setup.zero > 0, setup.frees_weights
        self.piped = not (load.embedding and load.head)
        # Without stages a tied model's ends share a weight, and are one unit, which stays gathered.
        self.ends_are_one = setup.spec.tied and not self.piped
        self.early = self.piped and self.sharded and not self.frees and not waits
        sums = _sums(setup, self.size)
        self.shards = sums.shard
        # What is reduced for every micro-batch adds up in shards.
        self.always = bool(np.all(setup.reduces_every_micro_batch))
        self.sums = self.shards if self.always else sums.whole
        # Spread experts are gathered and reduced apart from their block.
        block = sizes.weights["block"]
        self.own, self.alone = block.padded - block.apart, setup.shard_ranks <= setup.ep
        self.experts = block.apart * np.where(self.alone, 0, 1)
        self.message = np.where(np.asarray(block.apart) > 0, self.experts, self.own)
        self.weights: Figure = self.size.gathered_bytes(setup.precision)
        self.stays: Figure = 0.0
        if self.frees:
            self.weights = ends.gathered_bytes(setup.precision) if self.ends_are_one else 0.0
            self.stays = 0.0 if self.ends_are_one else load.head * sizes.weights["head"].padded
        self.needs = cache(self._needs)

    def _needs(self, kind: str, first: bool, last: bool, stays: bool) -> Figure:
        """What a pass needs on top of what is kept, at its fullest moment.

        first    no gradients have been added up yet
        last     gradients are reduced in it
        stays    the head's weights are still gathered
        """
        steps = {
            "forward": self._forward(first, stays),
            "backward": self._backward(first, last, stays),
            "backward-input": self._backward_input(),
            "backward-weight": self._backward_weight(first),
            "reduce": self._reduce(),
        }
        now: Figure = 0.0
        most: Figure = 0.0
        for moment, change in steps[kind]:
            most, now = np.maximum(most, now + moment), now + change
        return most

    def _forward(self, first: bool, stays: bool) -> Iterator[Step]:
        kept = self.sizes.kept
        gathers = first and self.sharded and not self.frees and not self.piped
        if gathers:
            yield UNSEEN, -self.weights
        for part, count in self.counts.items():
            weights = self.sizes.weights[part].padded
            others = self.blocks - kept[part].saved if part == "block" else 0.0
            yield weights if self.early and first else UNSEEN, others + gathers * count * weights
            gathered: Figure = 0.0
            if self.frees:
                gathered = self._gathered(part, weights, stays)
            elif gathers:
                gathered = self.message if part == "block" or self.ends_are_one else weights
            made = self.sizes.stream if part == "embedding" else 0.0
            yield kept[part].forward_peak + gathered, kept[part].saved + made

    def _gathered(self, part: Part, weights: Figure, stays: bool) -> Figure:
        """Weights that are freed after use, while forward runs through a part; with what they lie in."""
        if self.ends_are_one and part != "block":
            return weights if part == "embedding" else self.message
        if part == "embedding":
            return 2 * weights + self.own
        head = 0.0 if stays or self.ends_are_one else self.load.head * self.sizes.weights["head"].padded
        if part == "head":
            return 2 * head
        # Each gathers the next one.
        saved = self.sizes.kept[part].saved
        ahead = [head, self.own - saved, self.own - 2 * saved]
        return weights + self.message + reduce(np.maximum, ahead[: self.load.layers])

    def _backward(self, first: bool, last: bool, stays: bool) -> Iterator[Step]:
        load, kept, stream = self.load, self.sizes.kept, self.sizes.stream
        weights, sums = self.sizes.weights, self.sizes.sums
        # FSDP takes a unit's gradients when all are there; what is added to a sum in its own dtype is gone.
        stay = first or (self.sharded and (self.mixed or self.always))
        peak = "with_gradients" if stay else "backward_peak"
        tied = weights["embedding"].whole * self.ends_are_one
        reduces = self.sharded and (last or self.always)
        reducing: Figure = 0.0
        if load.head:
            gathered = self.own + (0.0 if stays or self.ends_are_one else weights["head"].padded)
            head_peak = "with_gradients" if self.ends_are_one else peak
            # The gradient of a shared weight waits for the embedding's part of it.
            yield (
                getattr(kept["head"], head_peak) + self.frees * gathered,
                tied - self.head - stays * self.stays,
            )
            if not self.ends_are_one:
                yield self._through("head", first, last)
                reducing = reduces * sums["head"].padded  # a buffer stays until the next one
        working, recomputing = self._block_backward(peak)
        moment, change = self._through("block", first, last, load.layers / self.segments)
        incoming: Figure = stream if load.head else 0.0
        visited = min(self.segments, 4 if self.frees else 3)
        for number in range(visited):
            # The block before is gathered ahead, unless it is there to be recomputed as well.
            ahead = self.own * (number < visited - 1 and (self.length or 1) == 1)
            needed = np.maximum(working + self.frees * ahead, recomputing)
            yield incoming + reducing + needed, stream - kept["block"].saved
            yield moment, change - stream
            if number == 1:
                yield UNSEEN, (self.segments - visited) * (change - kept["block"].saved)
            incoming, reducing = stream, reduces * (sums["block"].padded - sums["block"].apart)
        if load.embedding:
            yield stream + getattr(kept["embedding"], peak) + reducing, -kept["embedding"].saved
            yield 2 * tied, -tied
            yield self._through("embedding", first, last)

    def _block_backward(self, peak: str) -> Step:
        """What a block needs with its gathered weights; and when spread experts are gathered to recompute."""
        kept, plain = self.sizes.kept["block"], self.sizes.plain
        gathered = self.frees * (self.length or 1) * self.sizes.weights["block"].padded
        working = gathered + getattr(kept, peak)
        if self.length is None:
            return working, 0.0
        again = gathered + self.length * plain.saved + getattr(plain, peak) - kept.saved
        recomputing = (self.experts > 0) * (plain.forward_peak + gathered + self.frees * self.experts)
        return np.maximum(working, again), recomputing

    def _through(self, part: Part, first: bool, last: bool, count: float = 1) -> Step:
        """Backward is through with a part, or `count` of them: gradients are added up, or reduced."""
        weights, sums = self.sizes.weights[part], self.sizes.sums[part]
        if self.sharded and (last or self.always):
            freed = count * weights.padded if last and not self.frees else 0.0
            new = first or self.always
            kept = 0.0 if self.always and not first else sums.shard
            gone = 0.0 if new else sums.whole
            return (weights.whole if new else 0.0) + self._buffer(part) - freed, count * (kept - gone) - freed
        if not first:
            return UNSEEN, 0.0
        # Cast one by one; an end has hardly more than one.
        cast = self.sizes.widened[part] if part != "block" else 0.0
        return sums.whole + cast, count * sums.whole

    def _buffer(self, part: Part) -> Figure:
        """What a part's gradients are copied into, to be reduced.

        Torch still has a name for the last of them while it makes the shard: an end has hardly another.
        """
        sums = self.sizes.sums[part]
        if part == "block":
            return np.maximum(sums.padded - sums.apart, sums.apart * (1 + self.alone))
        small_last = part == "embedding" and self.setup.spec.positions == "learned"
        return sums.padded + (0 if small_last else sums.shard)

    def _backward_input(self) -> Iterator[Step]:
        load, stream = self.load, self.sizes.stream
        block, head = self.sizes.kept["block"], self.sizes.kept["head"]
        change = block.half_done - block.saved
        received: Figure = 0.0 if load.head else stream  # the gradient that comes lies in a buffer
        if load.head:
            yield head.half_peak, head.half_done - head.saved
        yield stream - received + block.half_peak, (load.layers - 1) * change - received
        yield stream + block.half_peak, change

    def _backward_weight(self, first: bool) -> Iterator[Step]:
        weights, head = self.sizes.weights, self.load.head * self.sizes.weights["head"].whole
        # A block's largest weight is about a third of it.
        largest = np.maximum(weights["block"].whole / 3, head)
        every = sum(count * weights[part].whole for part, count in self.counts.items())
        # Gradients of weights come one by one, and those of what they are made from go.
        made = (first or not self.sharded or self.mixed) * every
        needed = np.maximum(largest, made - self.halved)
        if not (first or self.sharded or self.mixed):
            # The head's is added to what is there in a new tensor, when the blocks are through.
            of_head = self.load.head * (self.sizes.kept["head"].half_done - self.sizes.kept["head"].saved)
            needed = np.maximum(needed, 2 * head - (self.halved - of_head))
        yield needed, -self.saved - self.halved
        if first:
            yield self.sums + self.load.head * self.sizes.widened["head"], 0.0

    def _reduce(self) -> Iterator[Step]:
        """Part after part: weights are freed, gradients copied together, and shards take their place."""
        for part, count in self.counts.items() if self.sharded else ():
            sums, freed = self.sizes.sums[part], 0.0 if self.frees else self.sizes.weights[part].padded
            yield self._buffer(part) - freed, count * (sums.shard - sums.whole - freed)
