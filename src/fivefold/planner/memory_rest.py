"""Elements of the parameters that one rank holds, as arrays over many layouts.

The same cuts as `axes/pieces.py` and `axes/sharding.py` make for one job, by the same functions; what of a
part's parameters a rank has depends on few numbers (tp, ep, and how many ranks shard), so that each
combination is counted once and then looked up. The rank meant is the first along tp and the data axes, which
has the most where sizes do not divide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.axes import expert, tensor
from fivefold.axes.pieces import EMBEDDING, shard_rows
from fivefold.ledger.setup import Number, Setup
from fivefold.models.inventory import Parameter, parameters
from fivefold.models.spec import ModelSpec

PARTS = ("embedding", "block", "head", "tied head")
"""Of each: what a rank holds. A "tied head" has its own copy of the embedding, as on another rank than it."""
FIELDS = 4

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Elements:
    """Of one part's parameters on one rank.

    whole    as it computes with them
    shard    as it keeps them under ZeRO, padding included
    padded   as FSDP gathers them
    tensors  parameters of which it updates anything
    """

    whole: Number
    shard: Number
    padded: Number
    tensors: Number

    def __add__(self, other: Elements) -> Elements:
        return Elements(*(a + b for a, b in zip(self.fields, other.fields, strict=True)))

    def times(self, count: Number) -> Elements:
        return Elements(*(count * field for field in self.fields))

    @property
    def fields(self) -> tuple[Number, ...]:
        return self.whole, self.shard, self.padded, self.tensors


def elements(setup: Setup) -> dict[str, Elements]:
    """By part of `PARTS`."""
    numbers = [setup.tp, setup.ep, setup.shard_ranks if setup.zero else 1]
    if not any(isinstance(number, np.ndarray) for number in numbers):
        row = _counted(setup.spec, *(int(number) for number in numbers))
        return {part: Elements(*row[place]) for place, part in enumerate(PARTS)}
    rows = np.stack([np.reshape(column, -1) for column in np.broadcast_arrays(*numbers)], axis=-1)
    firsts, where = distinct(rows)
    table = np.array([_counted(setup.spec, *map(int, rows[first])) for first in firsts], dtype=np.int64)
    picked = table[where]
    return {part: Elements(*picked[:, place].T) for place, part in enumerate(PARTS)}


def distinct(rows: Integers) -> tuple[Integers, Integers]:
    """Where each distinct row is first found, and which of them every row is.

    (`np.unique(axis=0)` does the same and takes ten times as long.)
    """
    code = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T:
        code = code * (int(column.max()) + 1) + column
    _, firsts, where = np.unique(code, return_index=True, return_inverse=True)
    return firsts, where.reshape(-1)


@lru_cache(maxsize=16384)
def _counted(spec: ModelSpec, tp: int, ep: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    members = _members(spec)
    return tuple(_sum(spec, members[part], tp, ep, ranks) for part in PARTS)


@lru_cache(maxsize=64)
def _members(spec: ModelSpec) -> dict[str, list[Parameter]]:
    one_layer = spec.model_copy(update={"layers": 1})
    names = {"embedding": "embedding", "blocks.0": "block", "head": "head"}
    found: dict[str, list[Parameter]] = {part: [] for part in PARTS}
    for parameter in parameters(one_layer):
        found[names[parameter.part]].append(parameter)
    copied = [p for p in found["embedding"] if p.name == EMBEDDING] if spec.tied else []
    found["tied head"] = found["head"] + copied
    return found


def _sum(spec: ModelSpec, members: list[Parameter], tp: int, ep: int, ranks: int) -> tuple[int, ...]:
    total = [0] * FIELDS
    for parameter in members:
        shape, spread = list(parameter.shape), ep > 1 and expert.is_expert(parameter.name)
        dimension = tensor.split_dimension(spec, parameter.name, tp)
        if dimension is not None:
            shape[dimension] = shard_rows(shape[dimension], tp, 0)
        if spread:
            shape[0] //= ep
        sharing = max(1, ranks // ep) if spread else ranks
        along = expert.shard_dimension(shape, sharing) if spread else 0
        whole = math.prod(shape)
        shard = whole // shape[along] * shard_rows(shape[along], sharing, 0)
        for place, value in enumerate((whole, shard, shard * sharing, int(shard > 0))):
            total[place] += value
    return tuple(total)


def on_rank(setup: Setup, parts: dict[str, Elements], layers: Any, embedding: Any, head: Any) -> Elements:
    """What a rank with so many layers, and with or without the ends of the model, holds."""
    ends = parts["head"]
    if setup.spec.tied:  # a pipeline has a copy for each end, even where one rank has both of them
        apart = np.asarray(setup.stages) > 1
        pairs = zip(parts["tied head"].fields, ends.fields, strict=True)
        ends = Elements(*(_either(apart, copied, one) for copied, one in pairs))
    return parts["block"].times(layers) + parts["embedding"].times(embedding) + ends.times(head)


def _either(condition: Any, this: Number, that: Number) -> Number:
    found: Any = np.where(condition, this, that)
    return found if found.ndim else int(found)
