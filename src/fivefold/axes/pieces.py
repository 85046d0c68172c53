"""Which piece of every parameter a rank computes with, after the pipeline, tensor and expert axes have cut.

The data axis comes last and works on these pieces: it shards their state, or sums their gradients.
`split` and `account` both follow from here, so that they cannot disagree on a shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.axes import expert, tensor
from fivefold.axes.layout import Layout, Place
from fivefold.axes.stages import stages, stages_of
from fivefold.models.inventory import Parameter, parameters

if TYPE_CHECKING:
    from fivefold.config import Job

EMBEDDING = "embedding.tokens.weight"


@dataclass(frozen=True)
class Piece:
    """One rank's piece of a parameter.

    name     the whole parameter's
    part     "embedding", "blocks.3" or "head": what it is gathered and freed with on this rank
    shape    this rank's, before ZeRO shards it
    copies   on how many ranks an element's gradient is found once all sums are done
    partial  its gradient is still to be summed over tp after backward
    expert   it is of experts that ranks have spread among them, and is reduced over those that hold the same
    shared   first and last stage of a tied model have a copy each, whose gradients are still to be summed
    """

    name: str
    part: str
    shape: tuple[int, ...]
    copies: int
    partial: bool = False
    expert: bool = False
    shared: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def pieces(job: Job, place: Place) -> list[Piece]:
    """The pieces of the rank at `place`, stage after stage, in the order of its modules' parameters."""
    spec, layout = job.spec, Layout.of(job)
    cut = stages(job)
    mine = [part for stage in stages_of(job, place.pp) for part in cut[stage]]
    tied_apart = spec.tied and len(cut) > 1
    members: dict[str, list[Parameter]] = {}
    for parameter in parameters(spec):
        members.setdefault(parameter.part, []).append(parameter)
    if tied_apart:
        members["head"] += [p for p in members["embedding"] if p.name == EMBEDDING]
    found = []
    for part in mine:
        for parameter in members[part]:
            shape, split_by_tp = list(parameter.shape), False
            dimension = tensor.split_dimension(spec, parameter.name, layout.tp)
            if dimension is not None:
                shape[dimension] = shard_rows(shape[dimension], layout.tp, place.tp)
                split_by_tp = True
            spread = layout.ep > 1 and expert.is_expert(parameter.name)
            if spread:
                shape[0] //= layout.ep
            shared = tied_apart and parameter.name == EMBEDDING
            copies = layout.dp_replicate * (1 if split_by_tp else layout.tp) * (2 if shared else 1)
            if layout.zero == 0:
                copies *= layout.shard_ranks // (layout.ep if spread else 1)
            partial = not split_by_tp and tensor.gradient_is_partial(
                spec, parameter.name, layout.tp, job.layout.sequence_parallel
            )
            found.append(Piece(parameter.name, part, tuple(shape), copies, partial, spread, shared))
    return found


def shard_rows(rows: int, ranks: int, rank: int) -> int:
    """How many of `rows` one rank holds: chunks of ceil(rows / ranks), the last ones shorter."""
    chunk = math.ceil(rows / ranks)
    return max(0, min(rows - rank * chunk, chunk))
