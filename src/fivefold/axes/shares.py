"""The parameters of a part, in sizes that may be arrays over many layouts.

`pieces` gives any one rank's piece of every parameter of one job, exactly. A search wants the same of
thousands of layouts at once, and blocks are alike: here is what the first rank along every axis has of one
part of the model, and it has the most. A test holds the two to each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from fivefold.axes import expert, tensor
from fivefold.axes.pieces import EMBEDDING
from fivefold.ledger.numbers import choose, divided_up
from fivefold.ledger.setup import Number, Setup
from fivefold.models.inventory import parameters
from fivefold.models.spec import ModelSpec

Part = Literal["embedding", "block", "head"]


@dataclass(frozen=True)
class Share:
    """The first rank's piece of a parameter, before ZeRO shards it.

    expert   it is of experts (which are spread over ranks where ep is above 1)
    partial  its gradient is still to be summed over tp after backward
    shared   it is a tied embedding, of which first and last stage have a copy each where there are stages
    """

    name: str
    shape: tuple[Number, ...]
    expert: bool
    partial: Any
    shared: bool

    @property
    def count(self) -> Number:
        return math.prod(self.shape)


def shares(setup: Setup, part: Part) -> list[Share]:
    """What the first rank has of a part. Of a tied model the head has a copy of the embedding, or 0 rows."""
    spec = setup.spec
    inventory_part = "blocks.0" if part == "block" else part
    found = [p for p in parameters(_one_block(spec)) if p.part == inventory_part]
    if part == "head" and spec.tied:
        found += [p for p in parameters(_one_block(spec)) if p.name == EMBEDDING]
    return [_share(setup, p.name, p.shape, part) for p in found]


def _one_block(spec: ModelSpec) -> ModelSpec:
    return spec.model_copy(update={"layers": 1})


def _share(setup: Setup, name: str, whole: tuple[int, ...], part: Part) -> Share:
    spec, tp = setup.spec, setup.tp
    shape: list[Number] = list(whole)
    partial: Any
    if name.rpartition(".")[0].endswith(tensor.OF_KEY_VALUE_HEADS):
        # With more ranks than heads all hold all of them, and each has a share of their gradient.
        shape[0] = choose(spec.kv_heads % tp == 0, divided_up(shape[0], tp), shape[0])
        partial = spec.kv_heads % tp > 0
    else:  # for every other parameter one degree is as good as another
        dimension = tensor.split_dimension(spec, name, 2)
        if dimension is not None:
            shape[dimension] = divided_up(shape[dimension], tp)
        partial = (tp > 1) & tensor.gradient_is_partial(spec, name, 2, setup.sequence_parallel)
    if expert.is_expert(name):
        shape[0] = shape[0] // setup.ep
    shared = spec.tied and name == EMBEDDING
    if shared and part == "head":
        shape[0] = choose(setup.pp > 1, shape[0], 0)
    return Share(name, tuple(shape), expert.is_expert(name), partial, shared)


def shard_count(setup: Setup, share: Share) -> Number:
    """How many elements of a share the first rank updates: all, or under ZeRO 1 to 3 its rows."""
    if setup.zero == 0:
        return share.count
    ranks = setup.shard_ranks
    if not share.expert:
        return _shard(share, 0, ranks)
    ranks = ranks // setup.ep
    by_rows = (setup.ep > 1) & (share.shape[0] % ranks > 0) & (share.shape[1] % ranks == 0)
    return choose(by_rows, _shard(share, 1, ranks), _shard(share, 0, ranks))


def _shard(share: Share, dimension: int, ranks: Number) -> Number:
    others = math.prod(size for axis, size in enumerate(share.shape) if axis != dimension)
    return others * divided_up(share.shape[dimension], ranks)
