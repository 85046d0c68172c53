"""What the data axis sends in a step for one part of the model; sizes may be arrays over many layouts.

`data.account` plays a rank's step in order and counts; here the outcome is put in closed form, part by part.

    zero 0     gradients are all-reduced in buckets. The program fills buckets across parts; here each part
               has its own: as many bytes, and at most one message more for each part.
    zero 1, 2  weights are gathered by the first forward pass and stay until the last backward pass.
    zero 3     a block is gathered in every forward and every backward pass, the embedding in forward alone,
               the head once for both. Schedules that split backward keep a stage's weights, as zero 2 does.

Gradients are reduced after every micro-batch (zero 2 and 3 without a pipeline) or once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fivefold.axes import data
from fivefold.axes.groups import EXPERT_REPLICAS, REPLICAS, SHARDS
from fivefold.axes.layout import EXPERT_SHARDS
from fivefold.axes.shares import Share, shard_count, shares
from fivefold.ledger.ledger import Message, Phase
from fivefold.ledger.numbers import choose
from fivefold.ledger.setup import Number, Setup


def block_state(setup: Setup) -> list[Message]:
    """One block, one optimizer step."""
    own = shares(setup, "block")
    if setup.zero == 0:
        return list(_buckets(setup, own))
    repeats = setup.micro_batches
    gathers: dict[Phase, Number] = {
        "forward": repeats if setup.frees_weights else 1,
        "backward": repeats if setup.frees_weights else 0,
    }
    # Experts that are spread over ranks are gathered apart.
    together = [share for share in own if not share.expert]
    experts = _elements(setup, [share for share in own if share.expert])
    with_them, apart = choose(setup.ep > 1, 0, experts), choose(setup.ep > 1, experts, 0)
    spread = setup.shard_ranks // setup.ep
    return [
        *_sharded(setup, _elements(setup, together) + with_them, SHARDS, setup.shard_ranks, gathers),
        *_sharded(setup, apart, EXPERT_SHARDS, spread, gathers),
    ]


def embedding_state(setup: Setup) -> list[Message]:
    """The embedding, one optimizer step; of a tied model without stages the head is gathered with it."""
    own = shares(setup, "embedding")
    if setup.zero == 0:
        return list(_buckets(setup, own))
    elements = _elements(setup, own)
    if setup.spec.tied:
        elements = elements + choose(setup.piped, 0, _elements(setup, shares(setup, "head")))
    gathers: dict[Phase, Number] = {"forward": setup.micro_batches if setup.frees_weights else 1}
    return _sharded(setup, elements, SHARDS, setup.shard_ranks, gathers)


def head_state(setup: Setup) -> list[Message]:
    """The last norm and the output projection, one optimizer step."""
    own = shares(setup, "head")
    if setup.zero == 0:
        return list(_buckets(setup, own))
    elements = _elements(setup, own)
    if setup.spec.tied:
        elements = choose(setup.piped, elements, 0)
    repeats = setup.micro_batches
    # Only backward frees the head: behind another backward it is gathered for backward.
    backward = repeats - 1 if setup.frees_weights and setup.pipeline.forwards_first else 0
    gathers: dict[Phase, Number] = {
        "forward": (repeats if setup.frees_weights else 1) - backward,
        "backward": backward,
    }
    return _sharded(setup, elements, SHARDS, setup.shard_ranks, gathers)


def _elements(setup: Setup, own: list[Share]) -> Number:
    return sum(shard_count(setup, share) for share in own)


def _sharded(
    setup: Setup, shard: Number, group: str, ranks: Number, gathers: Mapping[Phase, Number]
) -> list[Message]:
    exists = 1 * (shard > 0)
    counts = {phase: count * exists for phase, count in gathers.items()}
    reductions = choose(setup.reduces_every_micro_batch, setup.micro_batches, 1) * exists
    return data.shard_messages(setup, shard * ranks, group, ranks, counts, reductions)


def _buckets(setup: Setup, own: list[Share]) -> Iterator[Message]:
    """Zero 0: the part's gradients in buckets; those of spread experts in buckets of their own."""
    size, ranks = setup.precision.reduce_bytes, setup.dp_replicate * setup.cp
    apart = [choose(setup.ep > 1, share.count * size, 0) if share.expert else 0 for share in own]
    together = [share.count * size - spread for share, spread in zip(own, apart, strict=True)]
    limit = int(setup.bucket_mb * 2**20)
    for payload in filled_buckets(together, limit):
        yield from data.bucket_messages(setup, payload // size, REPLICAS, ranks)
    for payload in filled_buckets(apart, limit):
        yield from data.bucket_messages(setup, payload // size, EXPERT_REPLICAS, ranks // setup.ep)


def filled_buckets(sizes: list[Number], limit: int) -> list[Number]:
    """Bytes of the buckets of `comm.buckets.plan_buckets`; 0 where a layout has one bucket less."""
    found: list[Number] = []
    filled: Number = 0
    room: Number = 0
    for size in reversed(sizes):
        opens = size > room
        found.append(choose(opens, filled, 0))
        filled = choose(opens, size, filled + size)
        room = choose(opens, limit, room) - size
    return [*found, filled]
