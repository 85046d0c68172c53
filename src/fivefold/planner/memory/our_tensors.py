"""Tensors of a rank under our own program: the ledger's figures, put together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fivefold.axes.pieces import PARTS, Part, PartSize, part_sizes
from fivefold.hardware.devices import DeviceKind
from fivefold.ledger.optimizer import counter_bytes, master_bytes, moment_bytes
from fivefold.ledger.recompute import segment_length
from fivefold.ledger.setup import Figure, Setup
from fivefold.ledger.spread import spread
from fivefold.planner.memory.known_activations import activations
from fivefold.planner.memory.rank_memory import RankMemory
from fivefold.planner.memory.ranks import Rank, looked_at
from fivefold.planner.placement import ours as our_cut
from fivefold.replay.activations import Activations

HALF_DONE = 1.17
"""Where backward is cut in two, torch keeps the gradients of all that lies between: in played steps so many
times what was saved for backward."""


def ours(setup: Setup, device: DeviceKind = "cuda") -> list[RankMemory]:
    """The tensors of the ranks of `ranks.LOOKED_AT`."""
    parts, kept = part_sizes(setup), {part: activations(part, setup, device) for part in PARTS}
    plain = activations("block", replace(setup, recompute="none"), device)
    return [_rank(setup, rank, parts, kept, plain) for rank in looked_at(setup, our_cut)]


def _rank(
    setup: Setup,
    rank: Rank,
    parts: dict[Part, PartSize],
    kept: dict[Part, Activations],
    plain: Activations,
) -> RankMemory:
    """plain  of a block without recomputation"""
    held = rank.size(parts)
    length = _segment(setup, rank.layers / rank.stages)
    in_blocks, working = _blocks(rank, kept["block"], plain, length)
    head = rank.head * kept["head"].saved
    in_stage = in_blocks + rank.embedding / rank.stages * kept["embedding"].saved
    pairs = rank.in_flight + (HALF_DONE * rank.waiting if setup.splits_backward else 0)
    split = setup.tp if setup.sequence_parallel else 1
    stream = 1.0 * setup.tokens * setup.spec.dim * setup.precision.compute_bytes / split
    for_backward = pairs * in_stage + _heads(setup, rank) * head + stream * _received(setup, rank)
    gradients = held.shard * setup.precision.reduce_bytes
    whole = held.whole * setup.precision.reduce_bytes
    present = _gradients_present(setup, whole, gradients, in_stage + head)
    moving = _moving(setup, rank, parts, 1 if length is None else length, whole=present > gradients)
    # The fullest of four moments. What the head keeps is gone when a block's backward runs.
    loss_forward = rank.head * (kept["head"].forward_peak + stream + moving.loss_forward) - head
    loss_backward = rank.head * (kept["head"].backward_peak + moving.loss_backward)
    block_backward = working + moving.block - head
    computing = np.maximum(np.maximum(loss_forward, loss_backward), block_backward)
    at_end = (whole if setup.pipeline.forwards_first else gradients) + moving.end
    most = np.maximum(for_backward + computing + present, at_end)
    transient = np.maximum(computing, at_end - gradients) + np.maximum(present - gradients, 0)
    return RankMemory(
        number=rank.number,
        weights=_weights(setup, held),
        gradients=gradients,
        states=states(setup, held),
        activations=for_backward,
        transient=transient,
        spared=for_backward + transient + gradients - most,
    )


def states(setup: Setup, held: PartSize) -> Figure:
    """Master weights where they are a copy of their own, moments, averaged weights, step counters."""
    moments = moment_bytes(setup, held.updated)
    return master_bytes(setup, held.shard) + moments + counter_bytes(setup, held.tensors)


def _blocks(rank: Rank, block: Activations, plain: Activations, length: Any) -> tuple[Figure, Figure]:
    """Bytes that a stage's blocks keep of a micro-batch, and what one needs on top while it computes."""
    layers = rank.layers / rank.stages
    if length is None:
        return layers * block.saved, block.backward_peak
    # A segment's input is kept; backward makes what its blocks save, all of it, and then goes through them.
    again = length * plain.saved + plain.backward_peak - block.saved
    return layers / length * block.saved, np.maximum(block.backward_peak, again)


def _heads(setup: Setup, rank: Rank) -> Figure:
    """Of how many micro-batches a rank keeps the head's activations: also of those whose weights wait.

    Where a pipeline comes back to its first rank, others are half done at the fullest moment.
    """
    halved = setup.splits_backward and setup.pipeline.shape != "v"
    return rank.heads_kept + (rank.head * rank.waiting if halved else 0)


def _received(setup: Setup, rank: Rank) -> Figure:
    """How many of the stream's tensors torch's pipeline keeps to receive into, beyond what is in flight.

    There is one for every stage and micro-batch and either direction, from one step to the next. What a
    stage saves as its input is such a tensor, and counted where it is saved.
    """
    inputs = rank.stages - rank.embedding
    kept = setup.micro_batches * (inputs + rank.stages - rank.head) - rank.in_flight * inputs / rank.stages
    return np.where(setup.piped, np.maximum(kept, 0), 0)


def _segment(setup: Setup, layers: Any) -> Any:
    """How many blocks are run forward again together; None where whole blocks are not."""
    if not setup.recomputes_layers:
        return None
    counts = np.maximum(1, np.rint(layers)).astype(int)
    return spread(lambda count: segment_length(setup.recompute, count), counts)


def _gradients_present(setup: Setup, whole: Figure, shards: Figure, freed: Figure) -> Figure:
    """Gradients that are there when most activations are: none in a first pass, then whole ones or shards.

    freed  activations of one micro-batch: where all forwards come first, they go as gradients come
    """
    if setup.pipeline.forwards_first:
        return np.maximum(whole - freed, 0)
    # What is reduced once a step is kept whole until then, and has no shards yet.
    kept = np.where(setup.reduces_every_micro_batch, shards, whole)
    return np.where(setup.micro_batches > 1, kept, 0)


def _weights(setup: Setup, held: PartSize) -> Figure:
    """Compute weights that are held through the step."""
    if setup.zero == 0:
        return held.whole * setup.precision.compute_bytes
    return (0 if setup.frees_weights else 1) * held.padded * setup.precision.compute_bytes


@dataclass(frozen=True)
class _Moving:
    """Bytes that messages of weights and gradients add to four moments of a step."""

    loss_forward: Figure
    loss_backward: Figure
    block: Figure
    end: Figure


def _moving(setup: Setup, rank: Rank, parts: dict[Part, PartSize], length: Any, whole: Any) -> _Moving:
    """FSDP gathers into a flat buffer and copies out of it; the last buffer of a forward pass stays until its
    end. While a unit's backward runs the one before it is gathered, and the gradients of the one after it are
    reduced; where those were kept whole until now, they make room for it.

    length  blocks that are run forward again together, and gathered together
    whole   gradients are kept whole over the step
    """
    compute, reduced = setup.precision.compute_bytes, setup.precision.reduce_bytes
    block, first, end = parts["block"], parts["embedding"], parts["head"]
    several = setup.data_ranks * setup.cp > 1
    if setup.zero == 0:  # the embedding's gradient, and the bucket it is copied into
        return _Moving(0.0, 0.0, 0.0, rank.embedding * first.whole * np.where(several, reduced, compute))
    tied = setup.spec.tied
    output = first.padded + end.padded if tied else end.padded
    buffer = block.padded if tied else end.padded  # what was gathered last
    reducing = np.where(whole, 0, np.maximum(rank.head * end.padded, block.padded)) * reduced
    ending = rank.embedding * (first.whole * compute + first.padded * reduced) + block.padded * reduced
    if not setup.frees_weights:
        return _Moving(buffer * compute, 0.0, reducing, ending)
    return _Moving(
        loss_forward=(output + buffer) * compute,
        loss_backward=(output + block.padded) * compute,
        block=(length + 1) * block.padded * compute + reducing,
        end=ending,
    )
