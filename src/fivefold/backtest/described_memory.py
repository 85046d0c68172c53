"""Tensors of a rank under another software stack, from the description of that stack."""

from typing import Any

import numpy as np

from fivefold.axes.pieces import Part, PartSize, part_sizes
from fivefold.backtest.stacks import MemoryProfile, memory_profile
from fivefold.ledger.numbers import choose, spread
from fivefold.ledger.setup import Figure, Setup
from fivefold.planner.memory.fullest_rank import Memory, MemoryConstants, fullest, outside
from fivefold.planner.memory.moments import in_flight
from fivefold.planner.memory.rank_memory import RankMemory, looked_at
from fivefold.planner.placement import Load, on_ranks
from fivefold.planner.time.stack import Stack

BlockBytes = tuple[Figure, Figure, Figure]
"""Of a block and a micro-batch: what is kept, what its backward needs on top, and whole streams."""


def memory_of(setup: Setup, stack: Stack, constants: MemoryConstants) -> Memory:
    """What the ranks of a layout need. Constants may be arrays, where the setup is one layout."""
    profile, parts = memory_profile(stack.memory), part_sizes(setup)
    block = _block(setup, profile, constants)

    def ranks(pp: int, virtual: int, count: int) -> list[tuple[int, ...]]:
        loads = on_ranks(setup, stack.cut, pp, virtual)
        return [
            (rank, in_flight(setup.schedule, pp, rank, count, virtual), *loads[rank])
            for rank in looked_at(loads)
        ]

    found = spread(ranks, setup.pp, setup.virtual_stages, setup.micro_batches)
    tensors = [_rank(setup, profile, parts, block, rank) for rank in found]
    return fullest(tensors, constants, outside(setup))


def _rank(
    setup: Setup, profile: MemoryProfile, parts: dict[Part, PartSize], block: BlockBytes, rank: Any
) -> RankMemory:
    number, pairs, *held = rank
    load, (kept, block_working, streams) = Load(*held), block
    ends = load.embedding * parts["embedding"].whole + load.head * parts["head"].whole
    whole = 1.0 * (load.layers * parts["block"].whole + ends)
    shard = whole / (setup.shard_ranks if setup.zero else 1)
    width = setup.spec.dim * setup.precision.compute_bytes
    stream = 1.0 * setup.tokens * width / setup.stream_split

    states = profile.states * shard if setup.zero else profile.unsharded_states * whole
    each = profile.gradients[setup.precision.compute]
    # The stages of a pipeline keep what is gathered, and reduce gradients once a step.
    gradients = each * (np.where(setup.pp > 1, whole, shard) if setup.zero >= 2 else whole)
    weights = profile.weights * whole * (setup.pp > 1 if setup.zero == 3 else 1)
    gathered: Figure = 0.0
    if setup.zero == 3:
        # Two blocks' weights, one of them fetched ahead, and one's whole gradients; the head stays gathered.
        blocks = (2 * profile.weights + 4.0) * parts["block"].whole
        gathered = (blocks + profile.weights * load.head * parts["head"].whole) * (setup.pp == 1)

    logits = 1.0 * setup.tokens * (-(-setup.spec.vocab_size // setup.tp))
    current = load.layers / setup.virtual_stages * kept + load.head * 2 * stream
    heads_kept = choose((setup.pp > 1) & setup.pipeline.forwards_first, setup.micro_batches, 1)
    loss = np.maximum(load.head, load.loss) * profile.logits * logits * heads_kept
    fresh = (profile.fresh if setup.zero < 2 else 0.0) * whole
    working = np.maximum(block_working + loss, fresh - current)
    buckets = np.where(setup.data_ranks * setup.cp > 1, profile.buckets, 0.0) * whole
    return RankMemory(
        number=number,
        weights=weights,
        gradients=gradients,
        states=states,
        activations=pairs * current,
        transient=working + streams + gathered + buckets,
    )


def _block(setup: Setup, profile: MemoryProfile, constants: MemoryConstants) -> BlockBytes:
    spec, tokens = setup.spec, 1.0 * setup.tokens
    split = setup.stream_split
    query = spec.heads * spec.head_dim / setup.tp
    kv = 1.0 * setup.kv_heads * spec.head_dim
    sent = tokens * (spec.experts_per_token or 1)
    bytes_each = setup.precision.compute_bytes / 2
    hidden = (profile.gated if spec.gated else profile.ffn) * spec.ffn / setup.tp
    every = tokens * (profile.stream * spec.dim / split + profile.query * query + profile.kv * kv)
    every = every + sent * hidden
    if spec.experts:  # a copy of each token for every expert that it is sent to, there and back
        every = every + sent * 4.0 * spec.dim + tokens * spec.shared_experts * hidden
    every = every * bytes_each
    scores = profile.scores * spec.heads / setup.tp * tokens * setup.seq_len
    stream = tokens * spec.dim * 2 * bytes_each
    streams = profile.streams * stream * (setup.tp > 1)
    if setup.recompute == "none":
        gathered = constants.gathered * 2 * stream * ((setup.tp > 1) & (setup.pp == 1))
        return (every + scores + gathered, profile.working * every, streams)
    if setup.recompute == "selective":
        return (profile.selective * every, scores + profile.working * every, streams)
    kept = stream / (split if profile.checkpoint_split else 1)
    return (kept, every + scores, streams)


def impossible(setup: Setup, stack: Stack) -> str | None:
    """Why this stack cannot run one layout at all, whatever its memory; None when it can."""
    pp, count = int(setup.pp), int(setup.micro_batches)
    needs = memory_profile(stack.memory).needs
    if needs is not None and pp > 1 and count < pp + needs:
        return f"{count} micro-batches, but its 1f1b needs at least {pp + needs}"
    for rank, load in enumerate(on_ranks(setup, stack.cut, pp, int(setup.virtual_stages))):
        if not any(load):
            return f"rank {rank} of the pipeline is left without any part of the model"
    return None
