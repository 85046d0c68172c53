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

from fivefold.axes.groups import EXPERT_REPLICAS, REPLICAS, SHARDS, name_in
from fivefold.axes.layout import EXPERT_SHARDS, Layout
from fivefold.axes.pieces import Cut, Part, PartSize, Piece, first_pieces
from fivefold.axes.rules import rule
from fivefold.comm.payloads import compressed_bytes, fill_buckets
from fivefold.config import Job
from fivefold.ledger.ledger import Message, Phase
from fivefold.ledger.numbers import choose
from fivefold.ledger.setup import Number, Setup
from fivefold.ledger.spread import spread


@rule(
    "communication.compress",
    lambda setup: setup.compress == "none" or (setup.zero == 0) & (setup.dp_replicate * setup.cp > 1),
)
def _compression(setup: Setup) -> tuple[str, str]:
    why = f"under zero = {setup.zero}" if setup.zero > 0 else "with no other rank that holds the same weights"
    hint = "Only zero 0 compresses, where several ranks sum gradients: set layout.zero = 0, or leave it out."
    return f"'{setup.compress}' {why}", hint


@rule("layout.reduce", lambda setup: setup.reduce == "auto" or setup.zero >= 2)
def _reduction(setup: Setup) -> tuple[str, str]:
    hint = "Only zero 2 and 3 have the choice; zero 0 and 1 always reduce once per step. Leave it out."
    return f"'{setup.reduce}' under zero = {setup.zero}", hint


RULES = (_compression, _reduction)


def group_messages(setup: Setup, part: Part, padded: Number, *, experts: bool = False) -> list[Message]:
    """What FSDP sends in a step for `padded` elements of a part that it gathers and reduces together.

    experts  they are of experts that ranks have spread among them
    """
    group = EXPERT_SHARDS if experts else SHARDS
    ranks = setup.shard_ranks // setup.ep if experts else setup.shard_ranks
    gather, reduce = padded * setup.precision.compute_bytes, padded * setup.precision.reduce_bytes
    once = 1 * (padded > 0)
    reductions = choose(setup.reduces_every_micro_batch, setup.micro_batches, 1) * once
    copies = setup.dp_replicate
    return [
        *(
            Message("all_gather", gather, group, ranks, count * once, phase, phase)
            for phase, count in gathers(setup, part).items()
        ),
        Message("reduce_scatter", reduce, group, ranks, reductions, "backward", "backward"),
        # The copies of HSDP; after the last micro-batch, whenever shards are reduced.
        Message("all_reduce", reduce // ranks, "dp_replicate", copies, once, "backward", "backward"),
    ]


def gathered_together(setup: Setup, sizes: dict[Part, PartSize]) -> dict[Part, PartSize]:
    """What FSDP gathers in one group: of a tied model without stages, the head is with the embedding."""
    if not setup.spec.tied:
        return sizes
    head, several = sizes["head"], 1 * (setup.pp > 1)
    together = sizes["embedding"] + head.times(1 - several)
    return {**sizes, "embedding": together, "head": head.times(several)}


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
    behind = choose(setup.piped, repeats - 1, 0) if part == "head" and setup.pipeline.forwards_first else 0
    return {"forward": repeats - behind, "backward": behind}


def bucket_messages(setup: Setup, part: Part) -> list[Message]:
    """Under zero 0, the gradients of one part of the model in buckets of its own.

    The program fills buckets across parts: as many bytes, and at most one message less for each part.
    """

    def pieces(tp: int, ep: int, stages: int) -> list[Piece]:
        return first_pieces(Cut(setup.spec, tp, ep, bool(stages), setup.sequence_parallel), part)

    most = len(pieces(1, 1, 1))

    def filled(tp: int, ep: int, stages: int) -> list[list[int]]:
        mine = pieces(tp, ep, stages)
        sizes = [
            [sum(mine[index].count for index in bucket) for bucket in buckets]
            for buckets in gradient_buckets(mine, setup).values()
        ]
        return [row + [0] * (most - len(row)) for row in sizes]

    rows = spread(filled, setup.tp, setup.ep, 1 * (setup.pp > 1))
    return [
        message
        for group, row in zip((REPLICAS, EXPERT_REPLICAS), rows, strict=True)
        for elements in row
        for message in bucket_sum(setup, elements, group)
    ]


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


def bucket_sum(setup: Setup, elements: Number, group: str) -> list[Message]:
    """A bucket of gradients, summed as soon as backward has filled it.

    In 8 bits parts are exchanged, and their sums gathered when backward is done.
    """
    ranks = setup.dp_replicate * setup.cp
    if group == EXPERT_REPLICAS:
        ranks = ranks // setup.ep
    count = 1 * (elements > 0)
    if setup.compress == "none":
        payload = elements * setup.precision.reduce_bytes
        return [Message("all_reduce", payload, group, ranks, count, "backward", "backward")]
    payload = compressed_bytes(elements, ranks)
    return [
        Message("all_to_all", payload, group, ranks, count, "backward", "backward"),
        Message("all_gather", payload, group, ranks, count, "backward"),
    ]
