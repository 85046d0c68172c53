"""On a rank: two optimizer steps and a validation, with every number put together from its shards."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fivefold.axes.layout import Layout
from fivefold.axes.runtime.mesh import Mesh
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.data.batch import Batch
from fivefold.data.corpus import Corpus, open_corpus
from fivefold.training.build import Built, build
from fivefold.training.validation import validate

Tensors = dict[str, torch.Tensor]
RATES = {"adamw": 1e-2, "sgd": 0.1, "muon": 1e-2}
"""Learning rates that move weights by far more than they are rounded by, and by far less than their size."""


@dataclass(frozen=True)
class Taken:
    """One step: loss, gradient norm, and whole gradients, as they are and as the optimizer gets them."""

    loss: float
    grad_norm: float
    gradients: Tensors
    clipped: Tensors


@dataclass(frozen=True)
class Computed:
    """What a job computes: its steps, then what they left behind.

    begin     the weights before the first step
    moved     how far the steps moved them
    averaged  how far their moving average went, where there is one
    biases    what balances experts, where anything does; NaN where ranks disagree
    heldout   the loss on held-out documents
    """

    steps: list[Taken]
    begin: Tensors
    moved: Tensors
    averaged: Tensors
    biases: Tensors
    heldout: float


def compute(world: World, *jobs: Job) -> list[Computed]:
    """What each of the jobs computes, which share a layout; whole on rank 0, the others return nothing."""
    mesh = Mesh(Layout.of(jobs[0]), world.device)
    found = [_computed(job, build(job, world.device, mesh)) for job in jobs]
    return found if world.rank == 0 else []


def _computed(job: Job, built: Built) -> Computed:
    corpus, weights, averages = documents(job), built.weights, built.optimizer.ema
    begin = [master.detach().double().clone() for master in weights.masters]
    with corpus.train_loader(
        global_batch=job.training.global_batch,
        micro_batch=built.step.micro_batch,
        rank=built.mesh.data_rank,
        ranks=built.mesh.layout.data_ranks,
    ) as loader:
        steps = [_taken(built, next(loader), number + 1) for number in range(job.training.steps)]

    def moved(now: list[torch.Tensor]) -> Tensors:
        return weights.whole([each.detach().double() - b for each, b in zip(now, begin, strict=True)])

    return Computed(
        steps,
        weights.whole(begin),
        moved(weights.masters),
        moved(averages) if averages else {},
        _biases(built),
        heldout=validate(job, built, corpus) or math.nan,
    )


def documents(job: Job) -> Corpus:
    """Random tokens, packed in documents of different lengths: no two rows are cut alike."""
    return open_corpus(
        "random",
        seq_len=job.training.seq_len,
        seed=job.training.seed,
        vocab_size=job.spec.vocab_size,
        separate_documents=job.data.separate_documents,
        document_length=max(2, job.training.seq_len // 4),
    )


def _taken(built: Built, batches: list[Batch], number: int) -> Taken:
    """One step as training takes it. A step that fp16's loss scale was too large for is taken again."""
    with _watched(built) as seen:
        result = built.step(batches, RATES[built.job.optimizer.name], number)
        while result.skipped and result.problem is None:
            result = built.step(batches, RATES[built.job.optimizer.name], number)
    # A step whose numbers are not finite ends before the optimizer.
    return Taken(result.loss, result.grad_norm, seen["loss and norm"], seen.get("optimizer", {}))


@contextmanager
def _watched(built: Built) -> Iterator[dict[str, Tensors]]:
    """The whole gradients as the step has them when it begins each of its last phases."""
    seen: dict[str, Tensors] = {}

    def look(phase: str, part: int) -> None:
        if phase in ("loss and norm", "optimizer"):
            gradients = built.weights.collect_gradients()
            if phase == "optimizer" and built.step.clipping is not None:
                scale = built.step.clipping
                gradients = [gradient.to(scale.dtype) * scale for gradient in gradients]
            seen[phase] = _wide(built.weights.whole(gradients))

    before, built.step.tell = built.step.tell, look
    try:
        yield seen
    finally:
        built.step.tell = before


def _wide(tensors: Tensors) -> Tensors:
    return {name: tensor.double() for name, tensor in tensors.items()}


def _biases(built: Built) -> Tensors:
    """The balancing bias of each layer of experts, from all ranks that have the layer."""
    if built.job.training.balance != "bias":
        return {}
    mine = {
        f"blocks.{layer}.mlp.bias": moe.bias_steps.tolist()
        for layer, moe in built.step.experts.layers.items()
    }
    everyone = [mine]
    if dist.is_initialized():
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
    found: Tensors = {}
    for name, values in (entry for biases in everyone for entry in biases.items()):
        bias = torch.tensor(values, dtype=torch.float64)
        same = name not in found or torch.equal(found[name], bias)
        found[name] = bias if same else torch.full_like(bias, torch.nan)
    return found
