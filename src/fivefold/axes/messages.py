"""Every message of a layout, part by part, in sizes and counts that may be arrays over many layouts at once.

`account` puts a rank together from its parts, the search and the timeline many layouts. Messages are
written down in the file of their axis; groups bear names that hold for every layout (`axes/groups.py`).
"""

from dataclasses import dataclass

from fivefold.axes import context, data, expert, pipeline, tensor
from fivefold.axes.groups import EVERYONE
from fivefold.axes.pieces import Part, PartSize, part_sizes
from fivefold.ledger.ledger import Message, sent
from fivefold.ledger.setup import Number, Setup

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
    sizes = data.gathered_together(setup, part_sizes(setup))

    def state(part: Part) -> Messages:
        size, late = sizes[part], late_messages(setup, sizes[part])
        if not setup.zero:
            return sent([*data.bucket_messages(setup, part), *late])
        experts = data.group_messages(setup, part, size.apart, experts=True)
        return sent([*data.group_messages(setup, part, size.padded - size.apart), *experts, *late])

    return Traffic(
        block=sent(block_messages(setup)),
        inner_block=sent(block_messages(setup, closes_segment=False)),
        embedding=sent(tensor.embedding_messages(setup)),
        head=sent(tensor.head_messages(setup)),
        boundary=sent(pipeline.boundary_messages(setup)),
        block_state=state("block"),
        embedding_state=state("embedding"),
        head_state=state("head"),
        step=sent(step_messages(setup)),
    )


def block_messages(
    setup: Setup, *, closes_segment: bool = True, coming: Number | None = None, balanced_by_loss: bool = True
) -> list[Message]:
    """One block, one micro-batch: the messages of the tensor, context and expert axes, as they say there."""
    return [
        *tensor.block_messages(setup, closes_segment=closes_segment),
        *context.block_messages(setup),
        *expert.block_messages(setup, coming, balanced_by_loss=balanced_by_loss),
    ]


def late_messages(setup: Setup, size: PartSize) -> list[Message]:
    """Sums after backward: over tp of what its ranks have in part, between stages of a tied embedding."""
    partial, shared = (part * setup.precision.reduce_bytes for part in (size.partial, size.shared))
    total = Message("all_reduce", partial, "tp", setup.tp, 1 * (partial > 0), "optimizer", joins=True)
    return [total, *(pipeline.swap_messages(setup, shared) if setup.spec.tied else [])]


def step_messages(setup: Setup) -> list[Message]:
    """The token count before the step, loss and squared norm after, and what each expert of a layer got."""
    spec, ranks = setup.spec, setup.ranks
    found = [
        Message("all_reduce", 8, EVERYONE, ranks, 1, "forward"),
        Message("all_reduce", 16, EVERYONE, ranks, 1, "optimizer"),
    ]
    if spec.experts is not None:
        found.append(Message("all_reduce", 8 * spec.layers * spec.experts, EVERYONE, ranks, 1, "optimizer"))
    return found
