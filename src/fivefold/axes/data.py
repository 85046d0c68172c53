"""The data axis: every rank computes on its own share of the batch; gradients are summed over the ranks.

ZeRO says what the `dp_shard` ranks split beside the batch:

    zero 0   nothing: each rank holds everything (DDP). Gradients are all-reduced in buckets.
    zero 1   optimizer states. Gradients are reduce-scattered once per step, weights gathered once per step.
    zero 2   + gradients: reduce-scattered after every micro-batch.
    zero 3   + weights (FSDP): a layer's weights are gathered just before use and freed after.

`dp_replicate` above 1 beside `dp_shard` is HSDP: shards inside a group, copies across groups.

Stages 1 to 3 are FSDP2, one communication group per block, one for the embedding and one for the head
(tied models: one for both, on the root). Its sharded weights are the master weights; what it gathers are
compute weights. The loss is already divided by the global token count: gradients are summed, not averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from fivefold.axes.layout import Layout, Mesh
from fivefold.ledger.ledger import Held, Ledger, Message
from fivefold.ledger.precision import Precision, precision_named
from fivefold.ledger.recompute import segment_length
from fivefold.ledger.shelf import Shelf
from fivefold.models.inventory import Parameter, parameters
from fivefold.models.spec import ModelSpec
from fivefold.problems import Problem

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import FSDPModule

    from fivefold.config import Job
    from fivefold.models.decoder import Decoder


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


def groups(spec: ModelSpec) -> dict[str, list[Parameter]]:
    """The parameters that FSDP gathers and reduces together, in forward order.

    Tied models use the embedding first and last, so embedding and head are one group, called "root".
    """
    found: dict[str, list[Parameter]] = {}
    for parameter in parameters(spec):
        part = "root" if spec.tied and parameter.part in ("embedding", "head") else parameter.part
        found.setdefault(part, []).append(parameter)
    return found


def reduces_every_micro_batch(job: Job) -> bool:
    """Whether gradients are reduce-scattered after each micro-batch rather than once per step."""
    return Layout.of(job).zero >= 2 and job.layout.reduce != "step"


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
    shards = mesh.along("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else mesh.along("dp_shard")
    free = layout.zero == 3
    assert model.embedding is not None
    assert model.head is not None
    if not job.spec.tied:
        fully_shard(model.embedding, mesh=shards, mp_policy=policy, reshard_after_forward=free)
        cast(FSDPModule, model.embedding).set_unshard_in_backward(
            False
        )  # a lookup's backward needs no weights
        # Backward starts with the head: freeing it after forward would gather it again at once.
        fully_shard(model.head, mesh=shards, mp_policy=policy, reshard_after_forward=False)
    for block in model.blocks:
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

    units = [unit for unit in (model.embedding, *model.blocks, model.head) if isinstance(unit, FSDPModule)]
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

    def before_backward(self, last: bool) -> None:
        """Call before each micro-batch's forward; `last` for the last one of an optimizer step."""
        if not self.sharded:
            return
        self.root.set_requires_gradient_sync(last or self.every)
        self.root.set_requires_all_reduce(last)
        if self.layout.zero < 3:
            self.root.set_reshard_after_backward(last)


def local_slab(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of a parameter lies in the whole: (offset, shape) along each dimension.

    A plain tensor is its own whole. A DTensor sharded along dimension 0 over `dp_shard` holds the
    rows that `torch.chunk` gives its rank.
    """
    from torch.distributed.tensor import DTensor, Shard

    shape = tuple(parameter.shape)
    offset = [0] * len(shape)
    if not isinstance(parameter, DTensor):
        return tuple(offset), shape
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            ranks = parameter.device_mesh.size(axis)
            rows = math.ceil(shape[placement.dim] / ranks)
            offset[placement.dim] = min(
                rows * parameter.device_mesh.get_local_rank(axis), shape[placement.dim]
            )
    return tuple(offset), tuple(parameter.to_local().shape)


# --- account -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """One FSDP communication group, in elements."""

    name: str
    whole: int
    padded: int  # every parameter's rows rounded up to a multiple of the shard ranks

    def shard(self, ranks: int) -> int:
        return self.padded // ranks


def shard_rows(rows: int, ranks: int, rank: int) -> int:
    """How many of a parameter's rows one rank holds: chunks of ceil(rows / ranks), the last ones shorter."""
    chunk = math.ceil(rows / ranks)
    return max(0, min(rows - rank * chunk, chunk))


def _sized_groups(spec: ModelSpec, ranks: int) -> list[_Group]:
    sized = []
    for name, members in groups(spec).items():
        whole = sum(p.count for p in members)
        padded = sum(math.ceil(p.shape[0] / ranks) * ranks * math.prod(p.shape[1:]) for p in members)
        sized.append(_Group(name, whole, padded))
    return sized


def account(ledger: Ledger, job: Job) -> Ledger:
    """Add the weights and gradients that one rank holds, and the messages of one steady optimizer step."""
    layout = Layout.of(job)
    precision = precision_named(job.training.precision)
    if layout.zero == 0:
        return _account_replicated(ledger, job, layout, precision)
    return _account_sharded(ledger, job, layout, precision)


def _account_replicated(ledger: Ledger, job: Job, layout: Layout, precision: Precision) -> Ledger:
    from fivefold.comm.buckets import plan_buckets

    sizes = [p.count for p in parameters(job.spec)]
    weights = sum(sizes) * precision.compute_bytes
    gradients = [size * precision.reduce_bytes for size in sizes]
    buckets = [sum(gradients[i] for i in bucket) for bucket in plan_buckets(gradients, bucket_limit(job))]
    # While micro-batches add up, the head's gradient of a tied weight waits beside them for the embedding's.
    tied = next(p.count for p in parameters(job.spec) if p.name == "embedding.tokens.weight")
    waiting = tied * precision.compute_bytes if job.spec.tied and micro_batches(job) > 1 else 0
    ledger = ledger.hold(
        Held("weights", "compute weights", rest=weights, peak=weights),
        Held("gradients", "whole gradients", rest=sum(gradients), peak=sum(gradients) + waiting),
    )
    return ledger.send(
        *(
            Message("all_reduce", bucket, "dp_replicate", layout.dp_replicate, 1, "backward", "backward")
            for bucket in buckets
        )
    )


def bucket_limit(job: Job) -> int:
    """Bytes of a gradient bucket."""
    return int(job.layout.bucket_mb * 2**20)


def micro_batches(job: Job) -> int:
    """Micro-batches that each rank computes in one optimizer step."""
    assert job.training.micro_batch is not None
    return job.training.global_batch // (job.training.micro_batch * Layout.of(job).data_ranks)


def _account_sharded(ledger: Ledger, job: Job, layout: Layout, precision: Precision) -> Ledger:
    ranks = layout.dp_shard
    repeats = micro_batches(job)
    reduces = repeats if reduces_every_micro_batch(job) else 1
    for group in _sized_groups(job.spec, ranks):
        gather = group.padded * precision.compute_bytes
        reduce = group.padded * precision.reduce_bytes
        gathers = repeats if layout.zero == 3 else 1
        again = repeats if layout.zero == 3 and group.name.startswith("blocks") else 0
        ledger = ledger.send(
            Message("all_gather", gather, "dp_shard", ranks, gathers, "forward", "forward"),
            Message("all_gather", gather, "dp_shard", ranks, again, "backward", "backward"),
            Message("reduce_scatter", reduce, "dp_shard", ranks, reduces, "backward", "backward"),
            Message(
                "all_reduce", reduce // ranks, "dp_replicate", layout.dp_replicate, 1, "backward", "backward"
            ),
        )
    play = _Play(job, layout, precision)
    for repeat in range(repeats):
        play.micro_batch(last=repeat == repeats - 1)
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


class _Play:
    """Plays a step's gathers, frees and reductions in order, to see which weights and gradients are held.

    Only the tensors themselves are counted. The buffers that a collective copies into and out of come on
    top while it is in flight: one group's worth for a gather, and one for a reduction.
    """

    def __init__(self, job: Job, layout: Layout, precision: Precision):
        self.weights, self.gradients = Shelf(), Shelf()
        self.layout, self.precision, self.spec = layout, precision, job.spec
        self.groups = {group.name: group for group in _sized_groups(job.spec, layout.dp_shard)}
        self.blocks = [name for name in self.groups if name.startswith("blocks")]
        self.segment = segment_length(job.training.recompute, len(self.blocks)) or 1
        self.reduces_always = reduces_every_micro_batch(job)

    def micro_batch(self, last: bool) -> None:
        """Forward and backward of one micro-batch; `last` of its step."""
        for name in self.groups:
            self.gather(name)
            if self.layout.zero == 3 and name not in ("head", "root"):
                self.weights.take(name)
        if "root" in self.groups:
            self.differentiate_tied_head()
        else:
            self.differentiate("head", last)
        for start in reversed(range(0, len(self.blocks), self.segment)):
            again = self.blocks[start : start + self.segment]  # recomputed together, so gathered together
            for name in again:
                self.gather(name)
            for name in reversed(again):
                self.differentiate(name, last)
        self.differentiate("root" if "root" in self.groups else "embedding", last)

    def gather(self, name: str) -> None:
        self.weights.put(name, self.groups[name].padded * self.precision.compute_bytes)

    def differentiate(self, name: str, last: bool) -> None:
        """A group's gradients become complete, and are reduced or kept whole."""
        group, fresh, whole = self.groups[name], f"{name} fresh", f"{name} whole"
        self.gradients.take(f"{name} waiting")
        self.gradients.put(fresh, 0 if self.adds_up(name) else group.whole * self.precision.compute_bytes)
        self.gradients.take(fresh)
        if last or self.reduces_always:
            self.gradients.take(whole)
            self.gradients.put(
                f"{name} shard", group.shard(self.layout.dp_shard) * self.precision.reduce_bytes
            )
        else:
            self.gradients.put(whole, group.whole * self.precision.reduce_bytes)
        if self.layout.zero == 3 or last:
            self.weights.take(name)

    def differentiate_tied_head(self) -> None:
        """The head's gradients come first; that of the tied weight waits for the embedding's."""
        members = groups(self.spec)["root"]
        tied = sum(p.count for p in members if p.name == "embedding.tokens.weight")
        norm = sum(p.count for p in members if p.part == "head")
        early = tied + (0 if self.adds_up("root") else norm)
        self.gradients.put("root waiting", early * self.precision.compute_bytes)

    def adds_up(self, name: str) -> bool:
        """Whether fresh gradients are added in place to whole ones of the same dtype, taking no room."""
        return f"{name} whole" in self.gradients and not self.precision.mixed
