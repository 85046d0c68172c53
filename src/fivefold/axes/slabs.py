"""Where in the whole model lies what a rank keeps: its slab of each parameter, after every axis has cut.

The last axis of the mesh cuts first, each into chunks as `torch.chunk` does. `data_split.local_slab` reads
the same off a live rank's tensors; tests compare the two.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fivefold.axes import expert, tensor
from fivefold.axes.layout import Layout, Place
from fivefold.axes.pieces import Piece, pieces
from fivefold.config import Job
from fivefold.models.inventory import parameters
from fivefold.models.spec import ModelSpec


class Slab(NamedTuple):
    """A block of a tensor: its first element in the whole, and its shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


def slabs(job: Job, place: Place) -> dict[str, Slab]:
    """By parameter name, what the rank at `place` keeps of it: of its weights, moments and averages."""
    layout, whole = Layout.of(job), {each.name: each.shape for each in parameters(job.spec)}
    return {
        piece.name: slab(job.spec, layout, place, piece, whole[piece.name]) for piece in pieces(job, place)
    }


def slab(spec: ModelSpec, layout: Layout, place: Place, piece: Piece, whole: Sequence[int]) -> Slab:
    """What the rank at `place` keeps of its piece of a parameter, whose shape is `whole`."""
    start, shape = [0] * len(whole), list(whole)
    for dimension, ranks, rank in _cuts(spec, layout, place, piece):
        chunk = math.ceil(shape[dimension] / ranks)
        begin = min(chunk * rank, shape[dimension])
        start[dimension] += begin
        shape[dimension] = min(chunk, shape[dimension] - begin)
    return Slab(tuple(start), tuple(shape))


def _cuts(spec: ModelSpec, layout: Layout, place: Place, piece: Piece) -> Iterator[tuple[int, int, int]]:
    """Along which dimension, between how many ranks, and which of them this one is."""
    split = tensor.split_dimension(spec, piece.name, layout.tp)
    if split is not None:
        yield split, layout.tp, place.tp
    ranks, rank = layout.shard_ranks, place.dp_shard * layout.cp + place.cp
    if piece.expert:
        yield 0, layout.ep, rank % layout.ep
        ranks, rank = ranks // layout.ep, rank // layout.ep
    if layout.zero:
        yield expert.shard_dimension(piece.shape, ranks) if piece.expert else 0, ranks, rank
