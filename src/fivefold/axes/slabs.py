"""Where in the whole model lies what a rank keeps: its slab of each parameter, after every axis has cut.

The last axis of the mesh cuts first, each into chunks as `torch.chunk` does. `data_split.local_slab` reads
the same off a live rank's tensors; tests compare the two.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from fivefold.axes import expert, tensor
from fivefold.axes.layout import Layout, Place
from fivefold.axes.pieces import Piece, pieces
from fivefold.config import Job
from fivefold.models.inventory import parameters


class Slab(NamedTuple):
    """A block of a tensor: its first element in the whole, and its shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


def slabs(job: Job, place: Place) -> dict[str, Slab]:
    """By parameter name, what the rank at `place` keeps of it: of its weights, moments and averages."""
    layout, whole = Layout.of(job), {each.name: each.shape for each in parameters(job.spec)}
    found = {}
    for piece in pieces(job, place):
        start, shape = [0] * len(whole[piece.name]), list(whole[piece.name])
        for dimension, ranks, rank in _cuts(job, layout, place, piece):
            chunk = math.ceil(shape[dimension] / ranks)
            begin = min(chunk * rank, shape[dimension])
            start[dimension] += begin
            shape[dimension] = min(chunk, shape[dimension] - begin)
        found[piece.name] = Slab(tuple(start), tuple(shape))
    return found


def _cuts(job: Job, layout: Layout, place: Place, piece: Piece) -> Iterator[tuple[int, int, int]]:
    """Along which dimension, between how many ranks, and which of them this one is."""
    split = tensor.split_dimension(job.spec, piece.name, layout.tp)
    if split is not None:
        yield split, layout.tp, place.tp
    ranks, rank = layout.shard_ranks, place.dp_shard * layout.cp + place.cp
    if piece.expert:
        yield 0, layout.ep, rank % layout.ep
        ranks, rank = ranks // layout.ep, rank // layout.ep
    if layout.zero:
        yield expert.shard_dimension(piece.shape, ranks) if piece.expert else 0, ranks, rank
