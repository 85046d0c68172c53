"""The data axis: every rank computes on its own share of the batch; gradients are summed over the ranks.

ZeRO says what the `dp_shard` ranks split beside the batch:

    zero 0   nothing: each rank holds everything (DDP). Gradients are all-reduced in buckets.
    zero 1   optimizer states. Gradients are reduce-scattered once per step, weights gathered once per step.
    zero 2   + gradients: reduce-scattered after every micro-batch.
    zero 3   + weights (FSDP): a layer's weights are gathered just before use and freed after.

To this axis `cp` ranks are data ranks too: stages 1 to 3 shard over dp_shard x cp, with copies across
dp_replicate (HSDP), and stage 0 sums over dp_replicate x cp. Stages 1 to 3 are FSDP2: its sharded weights are
the master weights, and what it gathers are compute weights. The loss is already divided by the global token
count: gradients are summed, not averaged.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fivefold.axes.layout import EXPERT_REPLICAS, EXPERT_SHARDS, REPLICAS, SHARDS, Layout, Place, name_in
from fivefold.axes.pieces import Cut, Part, PartSize, Piece, first_pieces, pieces, size_of
from fivefold.axes.rules import rule
from fivefold.comm.payloads import BLOCK, RESIDUAL, compressed_bytes, fill_buckets, packed_bytes
from fivefold.config import Job
from fivefold.ledger.ledger import Message, Phase
from fivefold.ledger.numbers import choose, spread
from fivefold.ledger.setup import Figure, Number, Setup


@rule(
    "communication.compress",
    lambda setup: setup.compress == "none" or setup.dp_replicate * setup.dp_shard * setup.cp > 1,
)
def _compression(setup: Setup) -> tuple[str, str]:
    hint = "Split the batch over several ranks (layout.dp_replicate, layout.dp_shard), or leave it out."
    return f"'{setup.compress}', but no other rank sums the same gradients", hint


@rule(
    "communication.compress_on",
    lambda setup: setup.compress_on == "all" or (setup.compress != "none") & (setup.dp_replicate > 1),
)
def _compression_between_replicas(setup: Setup) -> tuple[str, str]:
    if setup.compress == "none":
        return "'replicate', but nothing is compressed", "Set communication.compress, or leave it out."
    hint = "Set layout.dp_replicate above 1, or communication.compress_on = 'all'."
    return "'replicate', but layout.dp_replicate is 1", hint


@rule("communication.error_feedback", lambda setup: setup.error_feedback or setup.compress != "none")
def _feedback(setup: Setup) -> tuple[str, str]:
    return "false, but nothing is compressed", "Set communication.compress, or leave it out."


@rule("layout.reduce", lambda setup: setup.reduce == "auto" or setup.zero >= 2)
def _reduction(setup: Setup) -> tuple[str, str]:
    hint = "Only zero 2 and 3 have the choice; zero 0 and 1 always reduce once per step. Leave it out."
    return f"'{setup.reduce}' under zero = {setup.zero}", hint


RULES = (_compression, _compression_between_replicas, _feedback, _reduction)


def rounded_numbers(setup: Setup, message: Message) -> Figure:
    """How many numbers a rank rounds for a message of gradients, where those travel compressed; or 0."""
    if setup.compress == "none" or message.operation != "all_to_all":
        return 0.0
    numbers: Figure = message.payload / packed_bytes(BLOCK, setup.compress) * BLOCK
    return numbers


def residual_bytes(setup: Setup, size: PartSize) -> Number:
    """Bytes of what error feedback keeps: of every number that a rank rounds before it is sent."""
    if setup.compress == "none" or not setup.error_feedback:
        return 0 * size.padded
    summing = setup.shard_ranks if setup.zero else setup.dp_replicate * setup.cp
    reduced = (size.padded - size.apart) * (summing > 1) + size.apart * (summing // setup.ep > 1)
    whole = reduced if setup.compresses_shards or not setup.zero else 0 * reduced
    return RESIDUAL * (whole + size.shard * (setup.dp_replicate > 1) * setup.compresses_replicas)


class Group(NamedTuple):
    """Parameters of one rank that FSDP gathers and reduces together, in a part of the model of this kind."""

    name: str
    part: Part
    members: list[Piece]
    size: PartSize


EXPERTS = ".mlp.experts"


def sharded_groups(job: Job, place: Place) -> list[Group]:
    """The groups of the rank at `place` under ZeRO 1 to 3, in forward order.

    Where one rank uses a tied embedding first and last, embedding and head are one group, called "root".
    Experts that are spread over ranks are a group of their own within their block.
    """
    layout, mine = Layout.of(job), pieces(job, place)
    ends_together = job.spec.tied and not any(piece.shared for piece in mine)
    found: dict[str, list[Piece]] = {}
    for piece in mine:
        part = "root" if ends_together and piece.part in ("embedding", "head") else piece.part
        found.setdefault(part + EXPERTS if piece.expert else part, []).append(piece)
    kinds: dict[str, Part] = {"root": "embedding", "embedding": "embedding", "head": "head"}
    return [
        Group(name, kinds.get(name, "block"), members, size_of(members, layout))
        for name, members in found.items()
    ]


def gathered_together(setup: Setup, sizes: dict[Part, PartSize]) -> dict[Part, PartSize]:
    """The same by part, experts apart: of a tied model without stages, the head is with the embedding."""
    if not setup.spec.tied:
        return sizes
    head, several = sizes["head"], 1 * (setup.pp > 1)
    together = sizes["embedding"] + head.times(1 - several)
    return {**sizes, "embedding": together, "head": head.times(several)}


def group_messages(setup: Setup, part: Part, size: PartSize) -> Iterator[Message]:
    """What FSDP sends in a step for what it gathers together of a part; spread experts go by themselves."""
    reductions = choose(setup.reduces_every_micro_batch, setup.micro_batches, 1)
    gathered, apart = size.gathered_bytes(setup.precision), size.apart * setup.precision.compute_bytes
    for group, ranks, padded, gather in (
        (SHARDS, setup.shard_ranks, size.padded - size.apart, gathered - apart),
        (EXPERT_SHARDS, setup.shard_ranks // setup.ep, size.apart, apart),
    ):
        once = 1 * (padded > 0)
        for phase, count in gathers(setup, part).items():
            yield Message("all_gather", gather, group, ranks, count * once, phase, phase)
        yield reduce_message(setup, padded, group, ranks, reductions * once)
        # The copies of HSDP; after the last micro-batch, whenever shards are reduced.
        copies = ("dp_replicate", setup.dp_replicate, once)
        if setup.compresses_replicas:
            yield from compressed_messages(setup, padded // ranks, *copies)
        else:
            payload = padded // ranks * setup.precision.reduce_bytes
            yield Message("all_reduce", payload, *copies, "backward", "backward")


def reduce_message(setup: Setup, elements: Number, group: str, ranks: Number, count: Number) -> Message:
    """FSDP's reduce-scatter; compressed, everyone's parts are exchanged, and added where they arrive."""
    if not setup.compresses_shards:
        payload = elements * setup.precision.reduce_bytes
        return Message("reduce_scatter", payload, group, ranks, count, "backward", "backward")
    payload = compressed_bytes(elements, ranks, setup.compress)
    return Message("all_to_all", payload, group, ranks, count, "backward", "backward")


def compressed_messages(
    setup: Setup, elements: Number, group: str, ranks: Number, count: Number
) -> Iterator[Message]:
    """A compressed sum on all ranks: parts are exchanged and added, and the sums gathered.

    FSDP does both while backward runs; buckets of whole gradients gather their sums when it is done.
    """
    payload = compressed_bytes(elements, ranks, setup.compress)
    yield Message("all_to_all", payload, group, ranks, count, "backward", "backward")
    yield Message("all_gather", payload, group, ranks, count, "backward", "backward" if setup.zero else None)


def gathers(setup: Setup, part: Part) -> dict[Phase, Number]:
    """How often a step gathers a part's weights.

    What is freed after use is gathered for every forward pass, and blocks for every backward pass too. The
    embedding's backward needs no weights. The head stays until its backward: only behind another backward it
    is gathered for backward.
    """
    if not setup.frees_weights:
        return {"forward": 1, "backward": 0}
    repeats = setup.micro_batches
    if part == "block" or (part == "embedding" and not setup.spec.looks_up):
        return {"forward": repeats, "backward": repeats}
    behind = choose(setup.pp > 1, repeats - 1, 0) if part == "head" and setup.pipeline.forwards_first else 0
    return {"forward": repeats - behind, "backward": behind}


def gradient_buckets(mine: list[Piece], setup: Setup) -> dict[str, list[list[int]]]:
    """Under zero 0: by group, which gradients are summed together, as indices into `mine`."""
    found = {}
    for group, experts in ((REPLICAS, False), (EXPERT_REPLICAS, True)):
        members = [index for index, piece in enumerate(mine) if piece.expert == experts]
        sizes = [mine[index].count * setup.precision.reduce_bytes for index in members]
        buckets = fill_buckets(sizes, int(setup.bucket_mb * 2**20))
        found[group] = [[members[index] for index in bucket] for bucket in buckets]
    return found


def replicated_buckets(job: Job, mine: list[Piece]) -> list[tuple[str, list[list[int]]]]:
    """As `gradient_buckets`, for each group that this job's mesh has, by its name there."""
    layout = Layout.of(job)
    named = [(name_in(layout, g), buckets) for g, buckets in gradient_buckets(mine, Setup.of(job)).items()]
    return [(axes, buckets) for axes, buckets in named if axes and buckets]


def bucket_sizes(mine: list[Piece], setup: Setup) -> dict[str, list[int]]:
    """By group, how many elements each bucket has."""
    return {
        group: [sum(mine[index].count for index in bucket) for bucket in buckets]
        for group, buckets in gradient_buckets(mine, setup).items()
    }


def part_bucket_sizes(setup: Setup, part: Part) -> dict[str, Any]:
    """As `bucket_sizes`, of one part of the model in buckets of its own, of one layout or of many.

    The program fills buckets across parts: as many bytes, and at most one message less for each part.
    """
    most = len(first_pieces(Cut(setup.spec, 1, 1, True, setup.sequence_parallel), part))

    def filled(tp: int, ep: int, stages: int) -> list[list[int]]:
        mine = first_pieces(Cut(setup.spec, tp, ep, bool(stages), setup.sequence_parallel), part)
        return [row + [0] * (most - len(row)) for row in bucket_sizes(mine, setup).values()]

    rows = spread(filled, setup.tp, setup.ep, 1 * (setup.pp > 1))
    return dict(zip((REPLICAS, EXPERT_REPLICAS), rows, strict=True))


def bucket_messages(setup: Setup, sizes: Mapping[str, Iterable[Number]]) -> Iterator[Message]:
    """Buckets of gradients, each summed as soon as backward has filled it."""
    for group, buckets in sizes.items():
        ranks = setup.dp_replicate * setup.cp // (setup.ep if group == EXPERT_REPLICAS else 1)
        for elements in buckets:
            count = 1 * (elements > 0)
            if setup.compress == "none":
                payload = elements * setup.precision.reduce_bytes
                yield Message("all_reduce", payload, group, ranks, count, "backward", "backward")
            else:
                yield from compressed_messages(setup, elements, group, ranks, count)
