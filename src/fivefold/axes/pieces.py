"""What a rank has of every parameter, after the pipeline, tensor and expert axes have cut.

The data axis comes last: it shards the state of these pieces, or sums their gradients. Training and `account`
take the pieces of one rank, a search those of the first rank along every axis, which has the most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from typing import Literal, NamedTuple

from fivefold.axes import expert, fp8, tensor
from fivefold.axes.layout import Layout, Place
from fivefold.axes.matrices import is_matrix
from fivefold.axes.stages import parts_of
from fivefold.config import Job
from fivefold.ledger.fp8 import NARROW
from fivefold.ledger.numbers import choose, spread
from fivefold.ledger.precision import Precision
from fivefold.ledger.setup import Number, Setup
from fivefold.models.inventory import EMBEDDING, Parameter, parameters
from fivefold.models.spec import ModelSpec

Part = Literal["embedding", "block", "head"]
"""A kind of part of the model: blocks are alike."""
PARTS: tuple[Part, ...] = ("embedding", "block", "head")


@dataclass(frozen=True)
class Piece:
    """One rank's piece of a parameter.

    name     the whole parameter's
    part     "embedding", "blocks.3" or "head": what it is gathered and freed with on this rank
    shape    this rank's, before ZeRO shards it
    split    tp ranks have different parts of it, rather than a copy each
    partial  its gradient is still to be summed over tp after backward
    expert   it is of experts that ranks have spread among them, and is reduced over those that hold the same
    shared   first and last stage of a tied model have a copy each, whose gradients are still to be summed
    matrix   Muon updates it, in jobs that have it
    narrow   ZeRO gathers it in 8 bits
    """

    name: str
    part: str
    shape: tuple[int, ...]
    split: bool = False
    partial: bool = False
    expert: bool = False
    shared: bool = False
    matrix: bool = False
    narrow: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def pieces(job: Job, place: Place) -> list[Piece]:
    """The pieces of the rank at `place`, stage after stage, in the order of its modules' parameters."""
    setup = Setup.of(job)
    narrow = frozenset(fp8.gathered_weights(setup))
    cut = Cut(setup.spec, int(setup.tp), int(setup.ep), bool(setup.pp > 1), setup.sequence_parallel, narrow)
    members = _members(cut.spec, cut.stages)
    return [
        piece_of(parameter, part, cut, place.tp)
        for parts in parts_of(job, place.pp).values()
        for part in parts
        for parameter in members[part]
    ]


def copies(piece: Piece, layout: Layout) -> int:
    """On how many ranks an element's gradient is found once all sums are done."""
    found = layout.dp_replicate * (1 if piece.split else layout.tp) * (2 if piece.shared else 1)
    if layout.zero == 0:
        found *= layout.shard_ranks // (layout.ep if piece.expert else 1)
    return found


@lru_cache(maxsize=64)
def _members(spec: ModelSpec, stages: bool) -> dict[str, list[Parameter]]:
    """Parameters by part. Of a tied model with stages the head has a copy of the embedding."""
    found: dict[str, list[Parameter]] = {}
    for parameter in parameters(spec):
        found.setdefault(parameter.part, []).append(parameter)
    if spec.tied and stages:
        found["head"] += [p for p in found["embedding"] if p.name == EMBEDDING]
    return found


class Cut(NamedTuple):
    """What a rank's pieces depend on, under ONE layout.

    stages  whether a pipeline has several
    narrow  parameters that ZeRO gathers in 8 bits
    """

    spec: ModelSpec
    tp: int
    ep: int
    stages: bool
    sequence_parallel: bool
    narrow: frozenset[str] = frozenset()


def piece_of(parameter: Parameter, part: str, cut: Cut, tp_rank: int = 0) -> Piece:
    """What a rank has of a parameter; `part` is what it is gathered with there."""
    spec, name, shape = cut.spec, parameter.name, list(parameter.shape)
    dimension = tensor.split_dimension(spec, name, cut.tp)
    if dimension is not None:
        shape[dimension] = shard_rows(shape[dimension], cut.tp, tp_rank)
    of_spread_experts = cut.ep > 1 and expert.is_expert(name)
    if of_spread_experts:
        shape[0] //= cut.ep
    return Piece(
        name,
        part,
        tuple(shape),
        split=dimension is not None,
        partial=tensor.gradient_is_partial(spec, name, cut.tp, cut.sequence_parallel),
        expert=of_spread_experts,
        shared=spec.tied and cut.stages and name == EMBEDDING,
        matrix=is_matrix(spec, name, parameter.shape),
        narrow=name in cut.narrow,
    )


def shard_rows(rows: int, ranks: int, rank: int) -> int:
    """How many of `rows` one rank holds: chunks of ceil(rows / ranks), the last ones shorter."""
    chunk = math.ceil(rows / ranks)
    return max(0, min(rows - rank * chunk, chunk))


def shard_size(piece: Piece, ranks: int, rank: int = 0) -> int:
    """How many elements one of `ranks` ranks keeps of a piece."""
    dimension = expert.shard_dimension(piece.shape, ranks) if piece.expert else 0
    rows = piece.shape[dimension]
    return piece.count // rows * shard_rows(rows, ranks, rank)


@dataclass(frozen=True)
class PartSize:
    """Elements of some pieces of one rank; of many layouts at once where they are arrays.

    whole    as it computes with them
    shard    as it keeps them under ZeRO, padding included
    padded   as FSDP gathers them
    updated  as it updates them: `shard` without the padding
    tensors  parameters of which it updates anything
    apart    of `padded`, those of spread experts, which are gathered in a group of their own
    narrow   of `padded`, those that are gathered in 8 bits
    partial  of `updated`, those whose gradients are still to be summed over tp
    shared   of `updated`, those of which another stage has a copy
    late     of `whole`, those that are either, or both
    matrices, matrix_tensors  of `updated` and `tensors`, those that are Muon's in jobs that have it
    """

    whole: Number = 0
    shard: Number = 0
    padded: Number = 0
    updated: Number = 0
    tensors: Number = 0
    apart: Number = 0
    narrow: Number = 0
    partial: Number = 0
    shared: Number = 0
    late: Number = 0
    matrices: Number = 0
    matrix_tensors: Number = 0

    def __add__(self, other: PartSize) -> PartSize:
        return PartSize(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, count: Number) -> PartSize:
        return PartSize(*(count * getattr(self, f.name) for f in fields(self)))

    def gathered_bytes(self, precision: Precision) -> Number:
        """What FSDP gathers and keeps of it until it is freed."""
        return self.padded * precision.compute_bytes - self.narrow * (precision.compute_bytes - NARROW)


def size_of(some: Iterable[Piece], layout: Layout, place: Place | None = None) -> PartSize:
    """The sizes of some pieces of the rank at `place`, the first one by default."""
    total, place = PartSize(), place or Place()
    ranks, rank = (layout.shard_ranks, place.dp_shard * layout.cp + place.cp) if layout.zero else (1, 0)
    for_experts = max(1, ranks // layout.ep), rank // layout.ep
    for piece in some:
        sharing, here = for_experts if piece.expert else (ranks, rank)
        shard, own = shard_size(piece, sharing), shard_size(piece, sharing, here)
        total += PartSize(
            whole=piece.count,
            shard=shard,
            padded=shard * sharing,
            updated=own,
            tensors=int(own > 0),
            apart=shard * sharing if piece.expert else 0,
            narrow=shard * sharing if piece.narrow else 0,
            partial=own if piece.partial else 0,
            shared=own if piece.shared else 0,
            late=piece.count if piece.partial or piece.shared else 0,
            matrices=own if piece.matrix else 0,
            matrix_tensors=int(own > 0) if piece.matrix else 0,
        )
    return total


def narrow_gradients(setup: Setup, size: PartSize) -> Number:
    """Of the elements that a rank computes with, those whose gradients stay in 16 bits until the update:
    where they may (`Setup`), and no other rank has anything to add.
    """
    within = setup.replica
    summing = within.dp_replicate * within.cp
    alone = (size.whole - size.apart - size.late) * (summing == 1)
    return within.may_keep_gradients_narrow * (alone + size.apart * (summing == setup.ep))


def gradient_bytes(setup: Setup, size: PartSize) -> Number:
    """Bytes of the whole gradients of what a rank computes with, as they add up over micro-batches."""
    precision = setup.precision
    saved = precision.reduce_bytes - precision.compute_bytes
    return size.whole * precision.reduce_bytes - narrow_gradients(setup, size) * saved


def gradient_width(setup: Setup) -> Number:
    """Bytes of a number of most gradients that a rank updates by."""
    precision, narrow = setup.precision, narrow_gradients(setup, part_sizes(setup)["block"])
    return choose(narrow > 0, precision.compute_bytes, precision.reduce_bytes)


def part_sizes(setup: Setup) -> dict[Part, PartSize]:
    """What the first rank along every axis has of each part, of every layout of a setup."""

    gathered = fp8.gathered_of_parts(setup)

    def counted(tp: int, ep: int, ranks: int, stages: int, *narrow: int) -> tuple[tuple[int, ...], ...]:
        names = frozenset(name for name, is_narrow in zip(gathered, narrow, strict=True) if is_narrow)
        return _counted(Cut(setup.spec, tp, ep, bool(stages), setup.sequence_parallel, names), ranks)

    ranks = setup.shard_ranks if setup.zero else 1
    narrow = (1 * condition for condition in gathered.values())
    found = spread(counted, setup.tp, setup.ep, ranks, 1 * (setup.pp > 1), *narrow)
    return {part: PartSize(*row) for part, row in zip(PARTS, found, strict=True)}


@lru_cache(maxsize=16384)
def _counted(cut: Cut, ranks: int) -> tuple[tuple[int, ...], ...]:
    """By part, the fields of its `PartSize`."""
    layout = Layout(dp_shard=ranks, tp=cut.tp, ep=cut.ep, zero=int(ranks > 1))
    return tuple(astuple(size_of(first_pieces(cut, part), layout)) for part in PARTS)


def first_pieces(cut: Cut, part: Part) -> list[Piece]:
    """What the first rank along every axis has of a part."""
    members = _members(cut.spec, cut.stages)["blocks.0" if part == "block" else part]
    return [piece_of(parameter, part, cut) for parameter in members]
