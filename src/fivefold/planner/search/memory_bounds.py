"""How much memory a layout needs at the least: never more than when it is played. In bytes of the device."""

from functools import lru_cache, partial

import numpy as np

from fivefold.axes.pieces import gradient_width, part_sizes
from fivefold.hardware.cluster import Cluster
from fivefold.ledger.fp8 import NARROW
from fivefold.ledger.numbers import spread
from fivefold.ledger.offload import travelling_bytes
from fivefold.ledger.setup import Figure, Setup
from fivefold.models.inventory import parameter_count
from fivefold.planner.memory.fullest_rank import on_device
from fivefold.planner.memory.known_activations import activations, of_one
from fivefold.planner.memory.moments import in_flight, moments
from fivefold.planner.memory.our_tensors import states
from fivefold.planner.memory.stage import segments
from fivefold.planner.placement import on_ranks
from fivefold.planner.placement import ours as our_cut


def least_memory(setup: Setup, cluster: Cluster) -> Figure:
    """Of the fullest rank: an even share of weights and states, and of gradients or activations.

    Muon's states are those of matrices, the smaller ones.
    Gradients come as activations go, so only the more of the two is sure to be there. Under ZeRO 1 and 2 the
    compute weights stay whole on every rank in the middle of a step; under 3 they do not.
    """
    precision = setup.precision
    share = parameter_count(setup.spec) / (1.0 * setup.tp * setup.pp * setup.ep)
    own = share / setup.shard_ranks if setup.zero else share
    each = NARROW if setup.gathers_in_8_bits else precision.compute_bytes
    weights = share * each if setup.zero < 3 else 0.0
    updated = setup.master_bytes(1) + setup.moment_bytes(1, matrices=1)
    on_host = 0 if cluster.device.is_host else travelling_bytes(setup)
    rest = own * (updated - on_host) + weights
    pairs: Figure = 1.0 / setup.virtual_stages
    if setup.schedule and _keeps_full(setup):
        pairs = np.minimum(setup.micro_batches, setup.pp) / (2 if setup.pipeline.shape == "v" else 1)
    saved = activations("block", setup, cluster.device.kind).saved
    kept = saved * setup.spec.layers / setup.pp * pairs
    gradients = own * gradient_width(setup)
    if setup.zero:  # weights may go as they come: stage by stage, or where the only micro-batch is the last
        gradients = gradients - weights * ((setup.pp > 1) | (setup.micro_batches == 1))
    return on_device(rest + np.maximum(kept, gradients), setup, cluster)


def _keeps_full(setup: Setup) -> bool:
    """Whether the first of many ranks keeps a micro-batch for each rank; of a v, half of one."""
    ranks, stages = 64, setup.pipeline.usual_stages
    each = 1 if setup.pipeline.shape == "v" else stages
    return in_flight(setup.schedule, ranks, 0, 4 * ranks, stages) >= ranks * each


def least_of_ends(setup: Setup, cluster: Cluster) -> Figure:
    """Of the first and the last rank of the pipeline: what they keep at their fullest moments."""
    parts, compute = part_sizes(setup), setup.precision.compute_bytes
    block = activations("block", setup, cluster.device.kind)
    stream = 1.0 * setup.tokens * setup.spec.dim * compute / setup.stream_split
    each = np.where(setup.reduces_every_micro_batch, parts["block"].shard, parts["block"].whole)
    most: Figure = 0.0
    ends_of = partial(_ends, of_one(setup, zero=0, cp_kind="", global_batch=1))
    rows = spread(ends_of, setup.pp, setup.virtual_stages, setup.micro_batches)
    for layers, embedding, head, receives, pairs, kept, half, added in rows:
        ends = parts["embedding"].times(embedding) + parts["head"].times(head)
        held = parts["block"].times(layers) + ends
        weights = 0.0 if setup.frees_weights else held.gathered_bytes(setup.precision)
        gradients = added * each * gradient_width(setup)
        saved = kept * block.saved + half * (block.half_done - block.saved) - pairs * stream
        received = receives * setup.micro_batches * stream
        most = np.maximum(most, weights + states(setup, held) + gradients + saved + received)
    return on_device(most, setup, cluster)


@lru_cache(maxsize=4096)
def _ends(setup: Setup, pp: int, virtual: int, count: int) -> list[tuple[int, ...]]:
    """Of the first and the last rank: the moments with most blocks kept, half done ones counted or not, and
    with most gradients.

    Each with the layers, embeddings and heads that the rank holds; tensors that it receives a micro-batch
    into; (stage, micro-batch) pairs alive, without whose input or result it may do; blocks of them of which
    something is kept; blocks between the two halves of their backward; layers whose gradients have come.
    """
    virtual = virtual if pp > 1 else 1
    loads, stages = on_ranks(setup, our_cut, pp, virtual), our_cut(setup, pp * virtual)
    found: list[tuple[int, ...]] = []
    for rank in (0, pp - 1):
        when = moments(setup.schedule, pp, rank, count, virtual, setup.splits_backward)
        # Before any stage is reduced and its weights are freed.
        live, half_done, sums = (c[~when.shards.any(axis=1)] for c in (when.live, when.half, when.sums))
        layers = np.array([stages[stage].layers for stage in when.stages])
        kept = live @ np.array([segments(setup.recompute, blocks) for blocks in layers.tolist()])
        half, added = half_done @ layers, sums @ layers
        receives = sum((stage > 0) + (stage < len(stages) - 1) for stage in when.stages)
        most = 1 + loads[rank].layers
        for fullness in (most * kept + added, most * (kept + half) + added, kept + (1 + kept.max()) * added):
            at = int(fullness.argmax())
            # Between the halves of backward neither is kept.
            alive = (live + half_done)[at].sum(), kept[at], half[at], added[at]
            found.append((*loads[rank][:3], receives, *map(int, alive)))
    return found
