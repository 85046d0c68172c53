"""Every message of a step, put together from those of the axes: part by part, or of one rank.

The search and the timeline take parts, in sizes and counts that may be arrays over many layouts at once;
`account` takes a rank. Messages are written down in the file of their axis. Groups of parts bear names that
hold for every layout, those of a rank the names of its mesh (`axes/layout.py`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

from fivefold.axes import context, data, expert, fp8, muon, outer, pipeline, tensor
from fivefold.axes.layout import EVERYONE, Layout, Place, name_in
from fivefold.axes.pieces import Part, PartSize, part_sizes, pieces, size_of
from fivefold.axes.stages import parts_of, rank_of
from fivefold.config import Job
from fivefold.ledger.ledger import Message, Phase, joined, repeated, sent
from fivefold.ledger.setup import Number, Setup, segment_length

Messages = tuple[Message, ...]
Received = Mapping[int, Sequence[int]]
"""By layer and micro-batch, how many tokens came to a rank's experts."""


class Traffic:
    """What the first rank along every axis sends for each part of the model, of one layout or of many.

    (Expert models: balanced by a term of the loss.)
    """

    def __init__(self, setup: Setup):
        self.setup, self.whole = setup.replica, setup

    @cached_property
    def block(self) -> Messages:
        """Of one micro-batch: tp, cp and ep messages of a block, the last of those recomputed together."""
        return sent(block_messages(self.setup))

    @cached_property
    def embedding(self) -> Messages:
        return sent(tensor.embedding_messages(self.setup))

    @cached_property
    def head(self) -> Messages:
        return sent(head_messages(self.setup))

    @cached_property
    def boundary(self) -> Messages:
        """Of one micro-batch, between neighbouring stages on different ranks, as the rank before it sees it.

        It sends forward and receives backward. The rank behind it does the opposite.
        """
        return sent(pipeline.boundary_messages(self.setup))

    @cached_property
    def state(self) -> dict[Part, Messages]:
        """Of a whole optimizer step: gathers and reductions of each part's weights and gradients."""
        setup, sizes = self.setup, data.gathered_together(self.setup, part_sizes(self.setup))
        found = {}
        for part, size in sizes.items():
            if setup.zero:
                of_data = data.group_messages(setup, part, size)
            else:
                of_data = data.bucket_messages(setup, data.part_bucket_sizes(setup, part))
            outer_step = outer.part_messages(self.whole, size)
            found[part] = sent([*of_data, *late_messages(setup, size), *outer_step])
        return found

    @cached_property
    def step(self) -> Messages:
        """Of a whole optimizer step: its own small messages."""
        return sent(
            [*step_messages(self.setup), *outer.told_messages(self.whole), *moved_messages(self.whole)]
        )


def block_messages(
    setup: Setup, closes_segment: bool = True, coming: Number | None = None, balanced: bool = True
) -> list[Message]:
    """One block, one micro-batch: the messages of the tensor, context and expert axes, as they say there, and
    those about scales."""
    return [
        *tensor.block_messages(setup, closes_segment),
        *context.block_messages(setup),
        *expert.block_messages(setup, coming, balanced),
        *fp8.block_messages(setup, coming),
    ]


def head_messages(setup: Setup) -> list[Message]:
    return [*tensor.head_messages(setup), *fp8.head_messages(setup)]


def late_messages(setup: Setup, size: PartSize) -> list[Message]:
    """Sums after backward: over tp of what its ranks have in part, between stages of a tied embedding."""
    partial, shared = (part * setup.precision.reduce_bytes for part in (size.partial, size.shared))
    total = Message("all_reduce", partial, "tp", setup.tp, 1 * (partial > 0), "optimizer", joins=True)
    return [total, *(pipeline.swap_messages(setup, shared) if setup.spec.tied else [])]


def step_messages(setup: Setup) -> list[Message]:
    """The token count before the step; loss, squared norm, asks and samples after it; what experts got; and
    after the update, scales."""
    payloads: list[tuple[Phase, int]] = [("forward", 8), ("optimizer", 32)]
    if setup.spec.experts is not None:
        payloads.append(("optimizer", 8 * setup.spec.layers * setup.spec.experts))
    every = [Message("all_reduce", size, EVERYONE, setup.ranks, 1, phase) for phase, size in payloads]
    return [*every, *fp8.step_messages(setup)]


def moved_messages(setup: Setup) -> Iterator[Message]:
    """Scales once more where an outer step has moved weights."""
    return repeated(fp8.step_messages(setup.replica), setup.fragments / setup.local_steps * setup.outer_steps)


def rank_messages(job: Job, place: Place, received: Received | None = None) -> Iterator[Message]:
    """All messages of the rank at `place`; `received` as in `replay.account`."""
    if job.communication.takes_outer_steps:
        within = rank_messages(outer.replica_of(job), replace(place, dp_replicate=0), received)
        scales = spelled(moved_messages(Setup.of(job)), Layout.of(job).replica)
        return chain(within, outer.outer_messages(job, place), scales)
    setup, layout, mine = Setup.of(job), Layout.of(job), pieces(job, place)
    if setup.zero:
        groups = data.sharded_groups(job, place)
        of_data = [m for group in groups for m in data.group_messages(setup, group.part, group.size)]
    else:
        of_data = [*data.bucket_messages(setup, data.bucket_sizes(mine, setup))]
    late = late_messages(setup, size_of(mine, layout, place))
    update = muon.update_messages(job, place)
    every = [*pass_messages(job, place, received), *of_data, *late, *step_messages(setup), *update]
    return spelled(joined(every), layout)


def spelled(messages: Iterable[Message], layout: Layout) -> Iterator[Message]:
    """The messages, their groups named as in the mesh of this layout."""
    return (replace(message, group=name_in(layout, message.group)) for message in messages)


def pass_messages(job: Job, place: Place, received: Received | None = None) -> Iterator[Message]:
    """The messages of all micro-batches' forward and backward passes: of the tp, cp, ep and pp axes."""
    setup, balanced = Setup.of(job), bool(job.training.balance_weight)
    repeats, dealt = int(setup.micro_batches), int(expert.dealt(setup, place.dp_shard * setup.cp + place.cp))
    for number, parts in parts_of(job, place.pp).items():
        layers = [int(part.removeprefix("blocks.")) for part in parts if part.startswith("blocks.")]
        length = segment_length(setup.recompute, len(layers)) or 1
        for place_in_stage, layer in enumerate(layers, start=1):
            closes = place_in_stage % length == 0 or place_in_stage == len(layers)
            # How many tokens come to this rank's experts, and in how many micro-batches they do.
            arrivals = Counter(received[layer]) if received else {dealt: repeats}
            for coming, times in arrivals.items():
                yield from repeated(block_messages(setup.of_layer(layer), closes, coming, balanced), times)
        if "embedding" in parts:
            yield from repeated(tensor.embedding_messages(setup), repeats)
        if "head" in parts:
            yield from repeated(head_messages(setup), repeats)
        if number > 0 and rank_of(job, number - 1) != place.pp:
            yield from repeated(pipeline.boundary_messages(setup, "after"), repeats)
        if number < setup.stages - 1 and rank_of(job, number + 1) != place.pp:
            yield from repeated(pipeline.boundary_messages(setup, "before"), repeats)
