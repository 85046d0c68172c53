"""The tensor axis: logits of ranks that share every layer, what they send, and parts that are seen alone."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold.axes import tensor
from fivefold.axes.checks import check
from fivefold.axes.layout import Layout, Place
from fivefold.axes.runtime import tensor_split
from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.runtime.tensor_layers import router
from fivefold.axes.runtime.vocabulary import summed_cross_entropy
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.models.decoder import Block, Decoder
from fivefold.models.loss import summed_cross_entropy as whole_cross_entropy
from fivefold.models.moe import Router
from fivefold.models.spec import ModelSpec
from fivefold.training.recompute import apply_recompute
from tests.cases import GEMMA, SPEC, TIED, Case, mesh_of, passes
from tests.ranks import on_ranks
from tests.tracer import MessageTracer

QK_NORM = SPEC | {"qk_norm": True, "qkv_bias": True}
PARALLEL = SPEC | {"parallel_block": True, "mlp_bias": True, "attention_out_bias": True}
ONE_KEY_HEAD = SPEC | {"kv_heads": 1, "qkv_bias": True, "qk_norm": True}
WIDE_HEADS = SPEC | {"kv_heads": 4, "head_dim": 10, "layers": 2}  # heads together wider than the stream
EXPERTS = SPEC | {"experts": 4, "experts_per_token": 2}
EXPERTS_WITH_BIASES = EXPERTS | {"shared_experts": 1, "mlp_bias": True, "activation": "gelu"}

SPECS = {
    "plain": SPEC,
    "tied, biases, layer norm, learned positions": TIED,
    "untied, biases, layer norm, learned positions": TIED | {"tied": False},
    "query and key norms": QK_NORM,
    "parallel block": PARALLEL,
    "one key head": ONE_KEY_HEAD,
    "wide heads": WIDE_HEADS,
    "gemma": GEMMA,
    "experts": EXPERTS,
    "experts, biases, a shared one": EXPERTS_WITH_BIASES,
}


def job_of(ranks: int, spec: dict[str, Any], sequence_parallel: bool = True, **training: Any) -> Job:
    layout = {"tp": ranks, "sequence_parallel": sequence_parallel}
    return Case("tensor", ranks, layout, {"micro_batch": 2, "global_batch": 2, **training}, spec=spec).job()


# --- the model, whole and split ----------------------------------------------------------------------------


def whole_values(name: str, shape: tuple[int, ...]) -> Tensor:
    """A parameter's values: no norm is 1 and no bias 0, so that each has a say."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 1 + 0.2 * noise if name.endswith("norm.weight") else 0.2 * noise


@torch.no_grad()
def fill(model: nn.Module, tp: int = 1, rank: int = 0) -> None:
    """Give each parameter its values, or the chunk of them that a tp rank should have."""
    for name, parameter in model.named_parameters():
        values = whole_values(name, tuple(parameter.shape))
        if isinstance(parameter, DTensor):
            dimension = tensor.split_dimension(model.spec, name, tp)  # type: ignore[arg-type]
            part = parameter.to_local()
            part.copy_(values if dimension is None else values.chunk(tp, dimension)[rank])
        else:
            parameter.copy_(values)


def inputs(job: Job, documents: bool, seed: int = 0) -> dict[str, Tensor]:
    """One micro-batch. Packed documents end inside ranks' parts of a sequence; some targets do not count."""
    rows, length = job.training.micro_batch or 1, job.training.seq_len
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(job.spec.vocab_size, (rows, length + 1), generator=generator)
    tokens[0, :2] = torch.tensor([0, job.spec.vocab_size - 1])  # the first and the last rank's
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
    found = {"tokens": tokens[:, :-1], "targets": targets}
    if documents:
        found["documents"] = (torch.arange(length) // 5).expand(rows, length) + torch.arange(rows)[:, None]
    return found


def whole_model(spec: ModelSpec) -> Decoder:
    model = Decoder(spec).double()
    fill(model)
    return model


def split_model(job: Job, mesh: Mesh) -> Decoder:
    """In the order of `training.build`."""
    with torch.device("meta"):
        model = Decoder(job.spec).double()
    tensor_split.split(model, mesh, job)
    apply_recompute(model, job.training.recompute)
    model.to_empty(device="cpu")
    fill(model, mesh.layout.tp, mesh.place.tp)
    return model


@dataclass(frozen=True)
class Found:
    """What one rank found in forward and backward of a micro-batch."""

    loss: float
    gradients: dict[str, Tensor]
    traffic: dict[tuple[str, int, str], int] = field(default_factory=dict)
    logits: Tensor | None = None


def compute(model: Decoder, batch: dict[str, Tensor]) -> Found:
    loss = model(**batch)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        gradients[name] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return Found(loss.item(), gradients)


def compute_split(world: World, job: Job, documents: bool) -> Found:
    """A job's numbers and messages on this rank."""
    mesh = mesh_of(Layout.of(job))
    model = split_model(job, mesh)
    batch = inputs(job, documents)
    with MessageTracer(mesh) as tracer:
        found = compute(model, batch)
    with torch.no_grad():
        logits = model(**{key: value for key, value in batch.items() if key != "targets"})
    return Found(found.loss, found.gradients, dict(tracer.traffic()), logits)


def put_together(job: Job, by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole gradients from the ranks': parts joined, shares summed; the rest must be equal on every rank."""
    whole = {}
    for name, first in by_rank[0].items():
        parts = [gradients[name] for gradients in by_rank]
        dimension = tensor.split_dimension(job.spec, name, len(parts))
        if dimension is not None:
            whole[name] = torch.cat(parts, dimension)
        elif tensor.gradient_is_partial(job.spec, name, len(parts), job.layout.sequence_parallel):
            whole[name] = torch.stack(parts).sum(0)
        else:
            assert all(torch.allclose(part, first, rtol=1e-12, atol=1e-12) for part in parts), name
            whole[name] = first
    return whole


# --- the same logits, and messages ------------------------------------------------------------------------


def tasks(ranks: int) -> dict[str, tuple[Job, bool]]:
    """By name: a job, and whether its sequences are packed documents."""
    found = {}
    for name, spec in SPECS.items():
        for sequence_parallel in (True, False):
            suffix = "" if sequence_parallel else ", whole sequences"
            found[f"{name}{suffix}"] = job_of(ranks, spec, sequence_parallel), False
    found["packed documents"] = job_of(ranks, SPEC), True
    found["packed documents, learned positions"] = job_of(ranks, TIED), True
    for mode in ("full", "every-2", "every-3", "sqrt", "selective"):
        for sequence_parallel in (True, False):
            job = job_of(ranks, PARALLEL if mode == "sqrt" else TIED, sequence_parallel, recompute=mode)
            found[f"recompute {mode}{'' if sequence_parallel else ', whole sequences'}"] = job, False
    return found


ON_FOUR = {
    "plain",
    "tied, biases, layer norm, learned positions, whole sequences",
    "query and key norms",  # four ranks, two key heads
    "one key head, whole sequences",
    "experts, biases, a shared one",
    "recompute every-3",
}


NAMES = [(2, name) for name in tasks(2)] + [(4, name) for name in tasks(4) if name in ON_FOUR]


@cache
def found_by_ranks(ranks: int, name: str) -> list[Found]:
    return on_ranks(compute_split, ranks, *tasks(ranks)[name])


@pytest.mark.parametrize(("ranks", "name"), NAMES)
def test_logits_are_whole_where_there_are_no_targets(ranks: int, name: str) -> None:
    job, documents = tasks(ranks)[name]
    batch = {key: value for key, value in inputs(job, documents).items() if key != "targets"}
    expected = whole_model(job.spec)(**batch)
    for found in found_by_ranks(ranks, name):
        torch.testing.assert_close(found.logits, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("ranks", "name"), NAMES)
def test_ranks_send_what_the_account_says(ranks: int, name: str) -> None:
    job, _ = tasks(ranks)[name]
    expected = passes(job, Place(), "tp").traffic()
    for found in found_by_ranks(ranks, name):
        assert found.traffic == expected


# --- parts that can be seen alone --------------------------------------------------------------------------


def split_loss(world: World, dtype: torch.dtype, vocabulary: int) -> tuple[Tensor, Tensor, list[torch.Size]]:
    """The loss of logits spread over ranks, its gradient here, and the shapes that forward kept."""
    logits, targets = loss_inputs(dtype, vocabulary)
    chunk = math.ceil(vocabulary / world.size)
    mine = logits[..., chunk * world.rank :][..., :chunk].clone().requires_grad_()
    kept: list[torch.Size] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved.shape)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        loss = summed_cross_entropy(mine, targets, chunk * world.rank, dist.group.WORLD)
    (3 * loss).backward()
    assert mine.grad is not None
    return loss.detach(), mine.grad, kept


def loss_inputs(dtype: torch.dtype, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 30 * torch.randn(2, 5, vocabulary, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (2, 5), generator=generator)
    targets[0, :2], targets[1, 0] = -100, vocabulary - 1
    return logits.to(dtype), targets


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [67, 64])
def test_the_loss_of_shared_logits(dtype: torch.dtype, vocabulary: int) -> None:
    logits, targets = loss_inputs(dtype, vocabulary)
    logits.requires_grad_()
    expected = whole_cross_entropy(logits, targets)
    (3 * expected).backward()
    assert logits.grad is not None
    by_rank = on_ranks(split_loss, 2, dtype, vocabulary)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for loss, _, kept in by_rank:
        assert loss.dtype == expected.dtype
        torch.testing.assert_close(loss, expected.detach(), rtol=min(tolerance, 1e-5), atol=0)
        assert all(shape.numel() < logits.numel() for shape in kept)
    gradient = torch.cat([part for _, part, _ in by_rank], -1)
    torch.testing.assert_close(gradient, logits.grad, rtol=tolerance, atol=tolerance)


def of_one_process(x: Tensor, weight: Tensor, bias: None) -> Tensor:
    whole = Router(weight.shape[1], weight.shape[0], bias=False)
    whole.weight = nn.Parameter(weight)
    return whole(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", [router, of_one_process])
def test_a_router_weighs_narrow_tokens_in_float32(compute: Any, dtype: torch.dtype) -> None:
    """Rounded to the tokens' own dtype, scores would be a thousand times further off, and choices change."""
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 5, 32), (8, 32)))
    exact = x.double() @ weight.double().T
    scores = compute(x, weight, None)
    assert (scores - exact).abs().max() <= 32 * 2**-24 * exact.abs().max()


def kept_by_a_norm(world: World, jobs: list[Job]) -> list[int]:
    """Numbers that a block's norm keeps from forward to backward, weights aside."""
    found = []
    for job in jobs:
        mesh = mesh_of(Layout.of(job))
        norm = cast(Block, split_model(job, mesh).blocks["0"]).attention_norm
        length = job.training.seq_len // (mesh.layout.tp if job.layout.sequence_parallel else 1)
        x = torch.randn(2, length, job.spec.dim, dtype=torch.float64, requires_grad=True)
        kept: dict[int, int] = {}

        def keep(saved: Tensor, kept: dict[int, int] = kept) -> Tensor:
            if saved.dim() == 3:
                kept[saved.data_ptr()] = saved.numel()
            return saved

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            norm(x)
        found.append(sum(kept.values()))
    return found


def test_sequence_parallelism_divides_what_norms_keep() -> None:
    for ranks in (2, 4):
        jobs = [job_of(ranks, SPEC, sequence_parallel) for sequence_parallel in (False, True)]
        for whole, shared in on_ranks(kept_by_a_norm, ranks, jobs):
            assert whole > 0
            assert shared * ranks == whole


def keeps_weights_tied(world: World, job: Job) -> bool:
    """Right after the split: `to_empty` would tie them again, but FSDP comes before it."""
    with torch.device("meta"):
        model = Decoder(job.spec)
    tensor_split.split(model, mesh_of(Layout.of(job)), job)
    assert model.embedding is not None
    assert model.head is not None
    return model.head.output.weight is model.embedding.tokens.weight


def test_a_tied_weight_stays_one_parameter() -> None:
    assert all(on_ranks(keeps_weights_tied, 2, job_of(2, TIED)))


# --- check -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "changes", "training", "said"),
    [
        (3, {"kv_heads": 1}, {"seq_len": 48}, "layout.tp = 1, 2 or 4, or model.heads = 3 or 6"),
        (4, {"ffn": 50}, {}, "layout.tp = 1, 2, 5, 10, 25 or 50, or model.ffn = 48 or 52"),
        (4, {"heads": 12, "kv_heads": 6, "head_dim": 8}, {}, "layout.tp = 1, 2, 3, 6 or 12"),
        (4, {"vocab_size": 5}, {}, "layout.tp = 3 or fewer, or model.vocab_size = 8"),
        (4, {}, {"seq_len": 18}, "training.seq_len = 16 or 20, or layout.sequence_parallel = false"),
    ],
)
def test_an_impossible_split_is_refused_with_the_number_to_change(
    tp: int, changes: dict[str, Any], training: dict[str, Any], said: str
) -> None:
    (problem,) = check(job_of(tp, SPEC | changes, **training), [tensor])
    assert said in problem.hint


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", SPECS)
def test_a_possible_split_is_not(tp: int, name: str) -> None:
    assert check(job_of(tp, SPECS[name]), [tensor]) == []


def test_whole_sequences_need_not_divide() -> None:
    assert check(job_of(4, SPEC, sequence_parallel=False, seq_len=18), [tensor]) == []


def test_context_ranks_cut_the_sequence_first() -> None:
    layout = {"tp": 4, "cp": 2}
    (problem,) = check(Case("long", 8, layout, {"seq_len": 20}).job(), [tensor])
    assert "training.seq_len = 16 or 24" in problem.hint
