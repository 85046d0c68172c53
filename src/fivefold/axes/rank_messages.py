"""The messages of one rank in one optimizer step, put together from those of the axes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fivefold.axes import data, expert, pipeline, tensor
from fivefold.axes.groups import spelled
from fivefold.axes.layout import Layout, Place
from fivefold.axes.messages import block_messages, late_messages, step_messages
from fivefold.axes.pieces import pieces, size_of
from fivefold.axes.sharding import sharded_groups
from fivefold.axes.stages import parts_of, rank_of, stage_count
from fivefold.config import Job
from fivefold.ledger.ledger import Message, joined, repeated
from fivefold.ledger.recompute import segment_length
from fivefold.ledger.setup import Setup

Received = Mapping[int, Sequence[int]]
"""By layer and micro-batch, how many tokens came to this rank's experts."""


def rank_messages(job: Job, place: Place, received: Received | None = None) -> Iterator[Message]:
    """All messages of the rank at `place`; `received` as in `replay.account`."""
    messages = [
        *pass_messages(job, place, received),
        *_state_messages(job, place),
        *step_messages(Setup.of(job)),
    ]
    return spelled(joined(messages), Layout.of(job))


def pass_messages(job: Job, place: Place, received: Received | None = None) -> Iterator[Message]:
    """The messages of all micro-batches' forward and backward passes: of the tp, cp, ep and pp axes."""
    setup = Setup.of(job)
    repeats = setup.micro_batches
    for number, parts in parts_of(job, place.pp).items():
        layers = [int(part.removeprefix("blocks.")) for part in parts if part.startswith("blocks.")]
        length = segment_length(setup.recompute, len(layers)) or 1
        for place_in_stage, layer in enumerate(layers, start=1):
            closes = place_in_stage % length == 0 or place_in_stage == len(layers)
            for coming, times in _coming(job, place, layer, received):
                balanced = bool(job.training.balance_weight)
                messages = block_messages(
                    setup, closes_segment=closes, coming=coming, balanced_by_loss=balanced
                )
                yield from repeated(messages, times)
        if "embedding" in parts:
            yield from repeated(tensor.embedding_messages(setup), repeats)
        if "head" in parts:
            yield from repeated(tensor.head_messages(setup), repeats)
        if number > 0 and rank_of(job, number - 1) != place.pp:
            yield from repeated(pipeline.boundary_messages(setup, "after"), repeats)
        if number < stage_count(job) - 1 and rank_of(job, number + 1) != place.pp:
            yield from repeated(pipeline.boundary_messages(setup, "before"), repeats)


def _coming(job: Job, place: Place, layer: int, received: Received | None) -> list[tuple[int, int]]:
    """Pairs: a number of tokens that come to this rank's experts, and in how many micro-batches they do."""
    setup = Setup.of(job)
    if received:
        return list(Counter(received[layer]).items())
    dealt = 0
    if setup.spec.experts is not None:
        dealt = int(expert.dealt(setup, place.dp_shard * job.layout.cp + place.cp))
    return [(dealt, int(setup.micro_batches))]


def _state_messages(job: Job, place: Place) -> Iterator[Message]:
    """What the data axis sends for this rank's pieces, and the sums after backward."""
    setup, layout, mine = Setup.of(job), Layout.of(job), pieces(job, place)
    if layout.zero:
        for group in sharded_groups(job, place):
            yield from data.group_messages(setup, group.part, group.padded, experts=group.experts)
    else:
        for name, buckets in data.gradient_buckets(mine, setup).items():
            for bucket in buckets:
                yield from data.bucket_sum(setup, sum(mine[index].count for index in bucket), name)
    yield from late_messages(setup, size_of(mine, layout, place))
