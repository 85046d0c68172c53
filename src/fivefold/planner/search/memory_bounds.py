"""How much memory a layout needs at the least: never more than when it is played. In bytes of the device."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fivefold.axes.pieces import PARTS, PartSize, part_sizes
from fivefold.hardware.cluster import Cluster
from fivefold.ledger.numbers import Known
from fivefold.ledger.setup import Figure, Number, Setup, segment_length
from fivefold.models.inventory import parameter_count
from fivefold.planner.memory.fullest_rank import on_device
from fivefold.planner.memory.known_activations import activations, of_one
from fivefold.planner.memory.moments import moments
from fivefold.planner.memory.our_tensors import states
from fivefold.planner.placement import on_ranks
from fivefold.planner.placement import ours as our_cut


def least_memory(setup: Setup, cluster: Cluster) -> Figure:
    """Of the fullest rank: an even share of weights and states, and of gradients or activations.

    Gradients come as activations go, so only the more of the two is sure to be there. Under ZeRO 1 and 2 the
    compute weights stay whole on every rank in the middle of a step; under 3 they do not.
    """
    precision, pipeline = setup.precision, setup.pipeline
    share = parameter_count(setup.spec) / (1.0 * setup.tp * setup.pp * setup.ep)
    own = share / setup.shard_ranks if setup.zero else share
    weights = share * precision.compute_bytes if setup.zero < 3 else 0.0
    rest = own * (setup.master_bytes(1) + setup.moment_bytes(1)) + weights
    in_flight: Figure = 1.0 / setup.virtual_stages
    if pipeline.keeps_full:
        in_flight = np.minimum(setup.micro_batches, setup.pp) / (2 if pipeline.shape == "v" else 1)
    saved = activations("block", setup, cluster.device.kind).saved
    kept = saved * setup.spec.layers / setup.pp * in_flight
    gradients = own * precision.reduce_bytes
    if (
        setup.zero
    ):  # weights may go as gradients come: stage by stage, or where the only micro-batch is the last
        gradients = gradients - weights * ((setup.pp > 1) | (setup.micro_batches == 1))
    return on_device(rest + np.maximum(kept, gradients), setup, cluster)


@dataclass(frozen=True)
class Rank:
    """What one rank holds, and what is alive at a moment at which it keeps much.

    pairs    (stage, micro-batch) pairs, without whose input or result it may do; `kept`: blocks of them of
             which something is kept
    half     blocks of those pairs that are between the two halves of their backward
    added    layers whose gradients have been added up by then
    receives tensors that a micro-batch is received into
    """

    layers: Number
    embedding: Number
    head: Number
    pairs: Number
    kept: Number
    half: Number
    added: Number
    receives: Number


def least_of_ends(setup: Setup, cluster: Cluster) -> Figure:
    """Of the first and the last rank of the pipeline: what they keep at their fullest moments."""
    parts, compute = part_sizes(setup), setup.precision.compute_bytes
    block = activations("block", setup, cluster.device.kind)
    split = setup.tp if setup.sequence_parallel else 1
    stream = 1.0 * setup.tokens * setup.spec.dim * compute / split
    most: Figure = 0.0
    known = _known(of_one(setup, zero=0, cp_kind="", global_batch=1))
    for rank in (Rank(*row) for row in known(setup.pp, setup.virtual_stages, setup.micro_batches)):
        counts = dict(zip(PARTS, (rank.embedding, rank.layers, rank.head), strict=True))
        held = sum((parts[part].times(count) for part, count in counts.items()), PartSize())
        weights = 0.0 if setup.frees_weights else (held.padded if setup.zero else held.whole) * compute
        each = np.where(setup.reduces_every_micro_batch, parts["block"].shard, parts["block"].whole)
        gradients = rank.added * each * setup.precision.reduce_bytes
        saved = rank.kept * block.saved + rank.half * (block.half_done - block.saved) - rank.pairs * stream
        received = rank.receives * setup.micro_batches * stream
        most = np.maximum(most, weights + states(setup, held) + gradients + saved + received)
    return on_device(most, setup, cluster)


@lru_cache(maxsize=256)
def _known(kind: Setup) -> Known:
    """The ends of pipelines that are alike but for their numbers."""
    return Known(lambda rows: [_ends(kind, *row) for row in rows.tolist()])


def _ends(setup: Setup, pp: int, virtual: int, count: int) -> list[tuple[int, ...]]:
    """Of the first and the last rank: the moments with most blocks kept, half done ones counted or not, and
    with most gradients.
    """
    virtual = virtual if pp > 1 else 1
    loads, stages = on_ranks(setup, our_cut, pp, virtual), our_cut(setup, pp * virtual)
    found: list[tuple[int, ...]] = []
    for rank in (0, pp - 1):
        mine = setup.pipeline.stages_of(rank, pp, virtual) if pp > 1 else [0]
        when = moments(setup.schedule, pp, rank, count, virtual, setup.splits_backward)
        # Before any stage is reduced and its weights are freed.
        live, half_done, sums = (c[~when.shards.any(axis=1)] for c in (when.live, when.half, when.sums))
        kept = live @ np.array([_kept_blocks(setup, stages[stage].layers) for stage in mine])
        half, added = (
            counts @ np.array([stages[stage].layers for stage in mine]) for counts in (half_done, sums)
        )
        receives = sum((stage > 0) + (stage < len(stages) - 1) for stage in mine)
        load = loads[rank]
        most = 1 + load.layers
        for fullness in (most * kept + added, most * (kept + half) + added, kept + (1 + kept.max()) * added):
            at = int(fullness.argmax())
            # Between the halves of backward neither is kept.
            alive = (live + half_done)[at].sum(), kept[at], half[at], added[at]
            found.append((load.layers, load.embedding, load.head, *map(int, alive), receives))
    return found


def _kept_blocks(setup: Setup, layers: int) -> int:
    """Of how many blocks of a stage something is kept: of each segment's first, where they are recomputed."""
    length = segment_length(setup.recompute, layers)
    return layers if length is None else -(-layers // length)
