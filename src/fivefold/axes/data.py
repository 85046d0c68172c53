"""The data axis: every rank computes on its own share of the batch; gradients are summed over the ranks.

ZeRO says what the `dp_shard` ranks split beside the batch:

    zero 0   nothing: each rank holds everything (DDP). Gradients are all-reduced in buckets.
    zero 1   optimizer states. Gradients are reduce-scattered once per step, weights gathered once per step.
    zero 2   + gradients: reduce-scattered after every micro-batch.
    zero 3   + weights (FSDP): a layer's weights are gathered just before use and freed after.

`dp_replicate` above 1 beside `dp_shard` is HSDP: shards inside a group, copies across groups. The ranks of
`cp` compute on different tokens with the same weights, so to this axis they are data ranks too: stages 1 to 3
shard over dp_shard x cp, and stage 0 sums over dp_replicate x cp.

Stages 1 to 3 are FSDP2, one communication group per block, one for the embedding and one for the head
(tied models: one for both, on the root). Its sharded weights are the master weights; what it gathers are
compute weights. The loss is already divided by the global token count: gradients are summed, not averaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from fivefold.axes import expert, pipeline
from fivefold.axes.layout import Layout, Mesh, Place
from fivefold.axes.pieces import EMBEDDING, Piece, pieces
from fivefold.axes.sharding import played_step, sharded_groups
from fivefold.ledger.ledger import Held, Ledger, Message, Phase
from fivefold.ledger.precision import Precision, precision_named
from fivefold.ledger.setup import Number, Setup
from fivefold.models.own.spec import OwnSpec
from fivefold.problems import Problem

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import FSDPModule

    from fivefold.config import Job
    from fivefold.models.decoder import Decoder
    from fivefold.models.moe import Moe


PHASES: tuple[Phase, ...] = ("forward", "backward")


# --- check ---------------------------------------------------------------------------------------------


def check(job: Job) -> list[Problem]:
    """Why this job's data split is impossible; empty when it is possible."""
    layout = Layout.of(job)
    problems = []
    if layout.zero == 0 and layout.dp_shard > 1:
        problems.append(
            Problem(
                "layout.zero",
                f"0 together with layout.dp_shard = {layout.dp_shard}",
                "Under zero = 0 nothing is sharded: use layout.dp_replicate, or zero = 1, 2 or 3.",
            )
        )
    if job.communication.compress != "none" and (layout.zero > 0 or not layout.replica_axes):
        why = f"under zero = {layout.zero}" if layout.zero > 0 else "with nobody to send gradients to"
        hint = (
            "Only zero 0 compresses, where several ranks sum gradients: set layout.zero = 0, or leave it out."
        )
        problems.append(Problem("communication.compress", f"'{job.communication.compress}' {why}", hint))
    if job.layout.reduce != "auto" and layout.zero < 2:
        problems.append(
            Problem(
                "layout.reduce",
                f"'{job.layout.reduce}' under zero = {layout.zero}",
                "Only zero 2 and 3 have the choice; zero 0 and 1 always reduce once per step. Leave it out.",
            )
        )
    return problems


# --- split ---------------------------------------------------------------------------------------------


def reduces_every_micro_batch(job: Job) -> bool:
    """Whether gradients are reduce-scattered after each micro-batch rather than once per step.

    The micro-batches of a pipeline overlap: there a stage reduces after its last one.
    """
    return Layout.of(job).zero >= 2 and job.layout.reduce != "step" and job.layout.pp == 1


def split(model: Decoder, mesh: Mesh, job: Job) -> Decoder:
    """Shard the model's state over the mesh, in place. Under zero 0 the model stays whole.

    The model may be on the meta device; its parameters become DTensors, sharded along dimension 0.
    """
    layout = mesh.layout
    if layout.zero == 0:
        return model
    import torch
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    precision = precision_named(job.training.precision)
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute) if precision.mixed else None,
        reduce_dtype=getattr(torch, precision.reduce) if precision.mixed else None,
        cast_forward_inputs=False,  # position tables stay in float32, as on one process
    )
    shards = mesh.along(*(["dp_replicate"] if layout.dp_replicate > 1 else []), layout.shard_axes)
    free = layout.zero == 3 and not pipeline.keeps_weights(job)
    whole = model.embedding is not None and model.head is not None
    if model.embedding is not None and not (job.spec.tied and whole):
        fully_shard(model.embedding, mesh=shards, mp_policy=policy, reshard_after_forward=free)
        # A lookup's backward needs no weights; of a user's own embedding nobody knows.
        cast(FSDPModule, model.embedding).set_unshard_in_backward(isinstance(job.spec, OwnSpec))
    if model.head is not None and not (job.spec.tied and whole):
        # Backward starts with the head: freeing it after forward would gather it again at once.
        fully_shard(model.head, mesh=shards, mp_policy=policy, reshard_after_forward=False)
    for block in model.blocks.values():
        if layout.ep > 1:
            expert.shard(cast("Moe", block.mlp), mesh, mp_policy=policy, reshard_after_forward=free)
        fully_shard(block, mesh=shards, mp_policy=policy, reshard_after_forward=free)
    fully_shard(model, mesh=shards, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # other factors need an operation gloo lacks
    if free:
        _prefetch(model)
    return model


def _prefetch(model: Decoder) -> None:
    """Gather the next unit's weights while this one computes. (Backward does so by itself.)"""
    from torch.distributed.fsdp import FSDPModule

    every = (model.embedding, *model.blocks.values(), model.head)
    units = [cast(FSDPModule, unit) for unit in every if isinstance(unit, FSDPModule)]
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])


class Synchronisation:
    """Tells the split model which micro-batch is the last of its step, so that it reduces when it should.

    This is the sharded form; `training.weights` feeds the buckets of zero 0 through `BucketedAllReduce`.
    """

    def __init__(self, model: Decoder, job: Job):
        self.layout = Layout.of(job)
        self.sharded = self.layout.zero > 0
        self.root = cast("FSDPModule", model)
        self.every = reduces_every_micro_batch(job)

    def before_micro_batch(self, last: bool) -> None:
        """Call before each micro-batch's forward; `last` for the last one of an optimizer step."""
        if not self.sharded:
            return
        self.root.set_requires_gradient_sync(last or self.every)
        self.root.set_requires_all_reduce(last)
        if self.layout.zero < 3:
            self.root.set_reshard_after_backward(last)


def local_slab(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of a parameter lies in the whole: (offset, shape) along each dimension.

    A plain tensor is its own whole. The mesh of a DTensor has the data axes first, and they shard what the
    axes behind them have left: so the last axis cuts first. Each cuts as `torch.chunk` does.
    """
    from torch.distributed.tensor import DTensor

    shape, offset = list(parameter.shape), [0] * parameter.dim()
    if not isinstance(parameter, DTensor):
        return tuple(offset), tuple(shape)
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        # Where two axes cut one dimension FSDP notes a private kind of shard; it, too, says which dimension.
        if (dim := getattr(placement, "dim", None)) is not None:
            ranks = parameter.device_mesh.size(axis)
            chunk = math.ceil(shape[dim] / ranks)
            start = min(chunk * parameter.device_mesh.get_local_rank(axis), shape[dim])
            offset[dim] += start
            shape[dim] = min(chunk, shape[dim] - start)
    return tuple(offset), tuple(shape)


# --- account -------------------------------------------------------------------------------------------


def shard_messages(
    setup: Setup,
    padded: Number,
    group: str,
    ranks: Number,
    gathers: Mapping[Phase, Number],
    reductions: Number,
) -> list[Message]:
    """What FSDP sends in a step for parameters that it gathers and reduces together: `padded` elements."""
    gather, reduce = padded * setup.precision.compute_bytes, padded * setup.precision.reduce_bytes
    return [
        *(
            Message("all_gather", gather, group, ranks, count, phase, phase)
            for phase, count in gathers.items()
        ),
        Message("reduce_scatter", reduce, group, ranks, reductions, "backward", "backward"),
        # The copies of HSDP; after the last micro-batch, whenever shards are reduced.
        Message(
            "all_reduce",
            reduce // ranks,
            "dp_replicate",
            setup.dp_replicate,
            1 * (padded > 0),
            "backward",
            "backward",
        ),
    ]


def account(ledger: Ledger, job: Job, place: Place) -> Ledger:
    """Add the weights and gradients that one rank holds, and the messages of one steady optimizer step."""
    layout = Layout.of(job)
    precision = precision_named(job.training.precision)
    if layout.zero == 0:
        return _account_replicated(ledger, job, layout, precision, place)
    return _account_sharded(ledger, job, layout, place)


def replicated_buckets(job: Job, mine: list[Piece]) -> list[tuple[str, list[list[int]]]]:
    """Under zero 0: which gradients are summed together over which group, as indices into `mine`."""
    from fivefold.comm.buckets import plan_buckets

    layout = Layout.of(job)
    precision = precision_named(job.training.precision)
    by_group: dict[str, list[int]] = {}
    for index, piece in enumerate(mine):
        axes = layout.expert_replica_axes if piece.expert else layout.replica_axes
        if axes:
            by_group.setdefault(axes, []).append(index)
    found = []
    for axes, members in by_group.items():
        plan = plan_buckets([mine[i].count * precision.reduce_bytes for i in members], bucket_limit(job))
        found.append((axes, [[members[i] for i in bucket] for bucket in plan]))
    return found


def _account_replicated(
    ledger: Ledger, job: Job, layout: Layout, precision: Precision, place: Place
) -> Ledger:
    mine = pieces(job, place)
    elements = sum(piece.count for piece in mine)
    weights, gradients = elements * precision.compute_bytes, elements * precision.reduce_bytes
    # While micro-batches add up, the head's gradient of a tied weight waits beside them for the embedding's.
    whole_here = job.spec.tied and not any(piece.shared for piece in mine)
    tied = sum(piece.count for piece in mine if piece.name == EMBEDDING)
    waiting = tied * precision.compute_bytes if whole_here and micro_batches(job) > 1 else 0
    ledger = ledger.hold(
        Held("weights", "compute weights", rest=weights, peak=weights),
        Held("gradients", "whole gradients", rest=gradients, peak=gradients + waiting),
    )
    for axes, plan in replicated_buckets(job, mine):
        ranks = layout.dp_replicate * layout.cp
        if axes == layout.expert_replica_axes != layout.replica_axes:
            ranks //= layout.ep
        for bucket in plan:
            elements = sum(mine[i].count for i in bucket)
            ledger = ledger.send(*bucket_messages(Setup.of(job), elements, axes, ranks))
    return ledger


def bucket_messages(setup: Setup, elements: Number, group: str, ranks: Number) -> list[Message]:
    """A bucket of gradients, summed as soon as backward has filled it.

    In 8 bits parts are exchanged, and their sums gathered when backward is done.
    """
    count = 1 * (elements > 0)
    if setup.compress == "none":
        payload = elements * setup.precision.reduce_bytes
        return [Message("all_reduce", payload, group, ranks, count, "backward", "backward")]
    from fivefold.comm.compression import compressed_bytes

    payload = compressed_bytes(elements, ranks)
    return [
        Message("all_to_all", payload, group, ranks, count, "backward", "backward"),
        Message("all_gather", payload, group, ranks, count, "backward"),
    ]


def bucket_limit(job: Job) -> int:
    """Bytes of a gradient bucket."""
    return int(job.layout.bucket_mb * 2**20)


def micro_batches(job: Job) -> int:
    """Micro-batches that each rank computes in one optimizer step."""
    assert job.training.micro_batch is not None
    return job.training.global_batch // (job.training.micro_batch * Layout.of(job).data_ranks)


def _account_sharded(ledger: Ledger, job: Job, layout: Layout, place: Place) -> Ledger:
    setup = Setup.of(job)
    play = played_step(job, place, reduces_every_micro_batch(job))
    for group in sharded_groups(job, place):
        gathers = {phase: play.gathers[group.name, phase] for phase in PHASES}
        reductions = play.reductions[group.name]
        messages = shard_messages(setup, group.padded, group.axes, group.ranks, gathers, reductions)
        ledger = ledger.send(*messages)
    weights, gradients = play.weights, play.gradients
    return ledger.hold(
        Held("weights", "gathered compute weights", weights.now, weights.peak),
        Held(
            "gradients",
            "gradient shards, and whole ones until they are reduced",
            gradients.now,
            gradients.peak,
        ),
    )
