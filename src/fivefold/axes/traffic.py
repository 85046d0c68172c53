"""Every message of a layout, part by part, in sizes and counts that may be arrays over many layouts at once.

`account` has the messages of one rank of one job, whole. A search wants those of thousands of layouts, and
puts ranks together from parts: so many blocks, with or without embedding and head. Both take each message
from the same functions of the axes; groups bear names that hold for every layout (`axes/groups.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fivefold.axes import context, expert, pipeline, state_traffic, tensor
from fivefold.axes.groups import EVERYONE
from fivefold.axes.shares import Part, shard_count, shares
from fivefold.ledger.ledger import Message, sent
from fivefold.ledger.numbers import choose
from fivefold.ledger.setup import Setup

Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Traffic:
    """What the first rank along every axis sends for each part of the model.

    For one micro-batch:
        block, embedding, head   tp, cp and ep messages of one such part. `block` is the last of those that
                     are recomputed together: without recomputation and under full, every one
        inner_block  a block that is recomputed together with the one after it
        boundary     between neighbouring stages on different ranks, as the rank before it sees it: it sends
                     forward and receives backward. The rank behind it does the opposite.
    For a whole optimizer step:
        block_state, embedding_state, head_state   gathers and reductions of the part's weights and gradients
        step         the step's own small messages
    """

    block: Messages
    inner_block: Messages
    embedding: Messages
    head: Messages
    boundary: Messages
    block_state: Messages
    embedding_state: Messages
    head_state: Messages
    step: Messages


def traffic(setup: Setup) -> Traffic:
    """The messages of a setup, of one layout or of many. (Expert models: balanced by a term of the loss.)"""
    beside_tp = [*context.block_messages(setup), *expert.block_messages(setup)]
    return Traffic(
        block=_kept([*tensor.block_messages(setup), *beside_tp]),
        inner_block=_kept([*tensor.block_messages(setup, closes_segment=False), *beside_tp]),
        embedding=_kept(tensor.embedding_messages(setup)),
        head=_kept(tensor.head_messages(setup)),
        boundary=_kept(pipeline.boundary_messages(setup)),
        block_state=_kept([*state_traffic.block_state(setup), *_late(setup, "block")]),
        embedding_state=_kept([*state_traffic.embedding_state(setup), *_late(setup, "embedding")]),
        head_state=_kept([*state_traffic.head_state(setup), *_late(setup, "head")]),
        step=_kept(step_messages(setup)),
    )


def _kept(messages: Iterable[Message]) -> Messages:
    return tuple(sent(messages))


def _late(setup: Setup, part: Part) -> list[Message]:
    """Sums after backward: over tp of what its ranks have in part, between stages of a tied embedding."""
    found, size = [], setup.precision.reduce_bytes
    own = [(share, shard_count(setup, share) * size) for share in shares(setup, part)]
    partial = sum(choose(share.partial, payload, 0) for share, payload in own)
    found.append(tensor.late_sum(partial, setup.tp))
    for share, payload in own:
        if share.shared:
            found += pipeline.swap_messages(setup, payload)
    return found


def step_messages(setup: Setup) -> list[Message]:
    """The step's own small messages: the token count before, the loss and the squared norm after.

    Of expert models also how many tokens each expert of each layer was given.
    """
    spec, ranks = setup.spec, setup.ranks
    found = [
        Message("all_reduce", 8, EVERYONE, ranks, 1, "forward"),
        Message("all_reduce", 16, EVERYONE, ranks, 1, "optimizer"),
    ]
    if spec.experts is not None:
        found.append(Message("all_reduce", 8 * spec.layers * spec.experts, EVERYONE, ranks, 1, "optimizer"))
    return found
