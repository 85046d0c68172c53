"""The expert axis against one process, in float64; and what its ranks send against the ledger."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from fivefold.axes import expert
from fivefold.axes.checks import check
from fivefold.axes.layout import EXPERT_SHARDS, SHARDS, Layout, name_in
from fivefold.axes.runtime import expert_split
from fivefold.axes.runtime.context_split import local_part
from fivefold.axes.runtime.data_split import local_slab
from fivefold.axes.runtime.mesh import Mesh
from fivefold.comm.collectives import all_reduce, copy_to_all
from fivefold.config import Job
from fivefold.models.decoder import Decoder
from fivefold.models.initial import initial_values
from fivefold.models.inventory import parameters
from fivefold.training.recompute import apply_recompute
from fivefold.verification import gradient_error
from tests import cases
from tests.cases import log_received, passes
from tests.ranks import on_ranks
from tests.tracer import MessageTracer

SPEC = cases.SPEC | {"experts": 8, "experts_per_token": 2, "layers": 2, "init_std": 0.3}
FULL = SPEC | {"mlp_bias": True, "shared_experts": 1, "activation": "gelu"}


@dataclass(frozen=True)
class Case(cases.Case):
    """One layout of one small model.

    shunned  experts that no token chooses
    sharded  shard the state over the ranks as ZeRO does
    alone    of the model, only one expert layer: what the other axes do around it is done by hand
    """

    spec: dict[str, Any] = field(default_factory=lambda: SPEC)
    shunned: tuple[int, ...] = ()
    sharded: bool = False
    alone: bool = False


def ep(name: str, ranks: int, degree: int, **fields: Any) -> Case:
    return Case(name, ranks, {"dp_shard": ranks, "ep": degree, "zero": 3}, **fields)


ALONE: dict[str, Any] = {"alone": True, "spec": FULL | {"shared_experts": 0}}
CASES = {
    case.name: case
    for case in (
        ep("ep 2", 2, 2),
        ep("ep 2, biases and shared experts", 2, 2, spec=FULL),
        ep("ep 2, nobody chooses some", 2, 2, shunned=(1, 2, 6)),
        ep("ep 2, one rank gets everything", 2, 2, shunned=(0, 1, 2, 3)),
        ep("ep 2, in turn", 2, 2, training={"routing": "balanced"}),
        ep("ep 2, micro-batches", 2, 2, training={"micro_batch": 1}),
        ep("ep 2, micro-batches in turn", 2, 2, training={"micro_batch": 2, "routing": "balanced"}),
        ep("ep 2, full", 2, 2, training={"micro_batch": 2, "recompute": "full"}, spec=FULL),
        ep("ep 2, every-2", 2, 2, training={"recompute": "every-2"}),
        ep("ep 2, selective", 2, 2, training={"recompute": "selective"}, spec=FULL),
        ep("ep 2, bias", 2, 2, training={"balance": "bias"}),
        ep("ep 4", 4, 4, spec=FULL),
        ep("ep 4, two ranks get everything", 4, 4, shunned=(0, 1, 6, 7)),
        ep("ep 2 of 4", 4, 2, training={"micro_batch": 1}),
        ep("zero 3, ep 2 of 4", 4, 2, sharded=True, spec=FULL, training={"micro_batch": 1}),
        ep("zero 3, ep 2 of 4, 3 experts for 2 ranks", 4, 2, sharded=True, spec=FULL | {"experts": 6}),
        ep("zero 3, ep 4", 4, 4, sharded=True, spec=FULL),
        Case("hsdp", 4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 3}, sharded=True),
        Case("cp 2 x ep 2", 2, {"cp": 2, "dp_shard": 1, "ep": 2, "zero": 1}, **ALONE),
        Case("cp 2", 2, {"cp": 2, "dp_shard": 1, "zero": 1, "cp_kind": "ulysses"}, **ALONE),
        Case("tp 2 x ep 2", 4, {"tp": 2, "dp_shard": 2, "ep": 2, "zero": 3}, **ALONE),
        Case(
            "cp 2 x ep 4, in turn",
            4,
            {"cp": 2, "dp_shard": 2, "ep": 4, "zero": 3},
            {"routing": "balanced", "seq_len": 12},
            alone=True,
            spec=SPEC | {"experts": 12, "experts_per_token": 5},
        ),
    )
}


def model_for(job: Job, case: Case, mesh: Mesh) -> Decoder:
    """Split, filled and with the case's router."""
    with torch.device("meta"):
        model = Decoder(job.spec).double()
    expert_split.split(model, mesh, job)
    apply_recompute(model, job.training.recompute)
    if case.sharded:
        shard(model, mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            offset, shape = local_slab(parameter)
            random = name.replace(".bias", ".bias, random")
            values = initial_values(job.spec, random, parameter.shape, 0, offset, shape, dtype=torch.float64)
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).copy_(values)
    for moe in expert_split.moes(model):
        moe.balance_rate = max(moe.balance_rate, 1.0 if case.shunned else 0.0)
        for number in case.shunned:
            moe.bias_steps[number] = -10
    return model


def shard(model: Decoder, mesh: Mesh) -> None:
    """As the data axis does under zero 3."""
    shards = mesh.along("dp_replicate", name_in(mesh.layout, SHARDS))
    for moe in expert_split.moes(model):
        if mesh.layout.ep > 1:
            expert_split.shard_experts(moe, mesh.along("dp_replicate", EXPERT_SHARDS))
    for block in model.blocks.values():
        fully_shard(block, mesh=shards)
    fully_shard(model, mesh=shards)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@dataclass
class Seen:
    """What one rank saw of a step: its parts of the gradients, where they belong, and its messages."""

    gradients: dict[str, tuple[tuple[int, ...], Tensor]]
    loss: float
    traffic: Counter[tuple[str, int, str]]
    received: dict[int, list[int]]
    routed: list[list[int]]


def run(world: Any, names: list[str]) -> list[Seen]:
    return [
        step(CASES[name].job(), CASES[name], cases.mesh_of(Layout.of(CASES[name].job()))) for name in names
    ]


def step(job: Job, case: Case, mesh: Mesh) -> Seen:
    """Forward and backward over this rank's micro-batches."""
    model = model_for(job, case, mesh)
    received = log_received(model)
    tracer = MessageTracer(mesh)
    rows = sequences(job).chunk(mesh.layout.data_ranks)[mesh.data_rank]
    loss = torch.zeros((), dtype=torch.float64)
    with tracer:
        for batch in rows.split(job.training.micro_batch or 1):
            part = layer_loss(model, mesh, job, batch) if case.alone else model(batch[:, :-1], batch[:, 1:])
            part.backward()
            loss += part.detach()
    return Seen(found_gradients(model), loss.item(), tracer.traffic(), received, routed(model))


def layer_loss(model: Decoder, mesh: Mesh, job: Job, batch: Tensor) -> Tensor:
    """One expert layer, with what cp and tp do around it."""
    embedding = initial_values(job.spec, "x", (job.spec.vocab_size, job.spec.dim), 0, dtype=torch.float64)
    x, group = embedding[batch[:, :-1]], mesh.group("tp")
    if mesh.layout.cp > 1:
        x = x[:, local_part(torch.arange(x.shape[1]), mesh.place, job)]
    x = copy_to_all(x.requires_grad_(), group)
    mixed: Tensor = all_reduce(expert_split.moes(model)[0](x), group)
    return (mixed * x).square().sum()


def sequences(job: Job) -> Tensor:
    shape = (job.training.global_batch, job.training.seq_len + 1)
    return torch.randint(0, job.spec.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def found_gradients(model: Decoder) -> dict[str, tuple[tuple[int, ...], Tensor]]:
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            found[name] = local_slab(parameter)[0], local.clone()
    return found


def routed(model: Decoder) -> list[list[int]]:
    return [moe.routed.tolist() for moe in expert_split.moes(model)]


def put_together(job: Job, seen: list[Seen]) -> dict[str, Tensor]:
    """Every parameter's gradient, summed over the ranks that computed a part of it."""
    whole: dict[str, Tensor] = {}
    for parameter in parameters(job.spec):
        for rank in seen:
            if parameter.name in rank.gradients:
                offset, part = rank.gradients[parameter.name]
                total = whole.setdefault(parameter.name, torch.zeros(parameter.shape, dtype=torch.float64))
                slab = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
                total[slab] += part
    return whole


@cache
def by_rank(ranks: int, sharded: bool) -> dict[str, list[Seen]]:
    names = [name for name, case in CASES.items() if (case.ranks, case.sharded) == (ranks, sharded)]
    found = on_ranks(run, ranks, names)
    return {name: [seen[index] for seen in found] for index, name in enumerate(names)}


def on_one_process(case: Case) -> Seen:
    alone = Case(
        case.name,
        training=case.training | {"micro_batch": 8, "recompute": "none"},
        spec=case.spec,
        shunned=case.shunned,
        alone=case.alone,
    )
    return step(alone.job(), alone, Mesh(Layout(), torch.device("cpu")))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(name: str):
    case = CASES[name]
    job, seen = case.job(), by_rank(case.ranks, case.sharded)[name]
    reference = on_one_process(case)
    copies = job.layout.tp
    assert sum(rank.loss for rank in seen) / copies == pytest.approx(reference.loss, rel=1e-12)
    shares = seen[: len(seen) // (job.layout.dp_replicate or 1)] if case.sharded else seen
    error, parameter = gradient_error(put_together(job, shares), put_together(job, [reference]))
    assert error <= 1e-11, parameter
    counts = torch.tensor([rank.routed for rank in seen]).sum(0) // copies
    assert counts.tolist() == reference.routed
    assert case.alone or all(counts[:, list(case.shunned)].sum(1) == 0)
    assert case.alone or counts.sum() == 2 * 2 * 8 * 16


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.sharded])
def test_messages_are_those_of_the_ledger(name: str):
    case = CASES[name]
    job = case.job()
    layout = Layout.of(job)
    for number, rank in enumerate(by_rank(case.ranks, case.sharded)[name]):
        place = layout.place(number)
        told = rank.received if job.training.routing == "learned" and layout.ep > 1 else None
        if case.alone and told is not None:  # the other layers as the one that ran
            told = dict.fromkeys(range(job.spec.layers), told[0])
        expected = passes(job, place, "ep", told).traffic()
        if case.alone:
            expected = Counter({key: count // job.spec.layers for key, count in expected.items()})
        found = Counter({key: count for key, count in rank.traffic.items() if key[2] != "tp"})
        assert found == expected
        assert found


def test_experts_that_no_other_rank_holds_are_not_sent():
    for rank in by_rank(4, True)["zero 3, ep 4"]:
        assert not [key for key in rank.traffic if key[2] == EXPERT_SHARDS]
    for rank in by_rank(4, True)["zero 3, ep 2 of 4"]:
        assert [key for key in rank.traffic if key[2] == EXPERT_SHARDS]


@pytest.mark.parametrize(
    ("shape", "ranks", "dimension"), [((4, 6, 5), 2, 0), ((3, 6, 5), 2, 1), ((3, 7, 5), 2, 0), ((1, 6), 3, 1)]
)
def test_experts_are_sharded_evenly_where_they_can_be(shape: tuple[int, ...], ranks: int, dimension: int):
    assert expert.shard_dimension(shape, ranks) == dimension


@pytest.mark.parametrize(
    ("ranks", "layout", "experts", "message", "hint"),
    [
        (
            4,
            {"dp_shard": 4, "ep": 4},
            6,
            "4 ranks cannot share model.experts = 6",
            "1 or 2, or model.experts = 8",
        ),
        (4, {"dp_shard": 4, "ep": 8}, 8, "8 does not divide", "1 or 2 or 4, or layout.dp_shard = 8"),
        (6, {"dp_shard": 3, "cp": 2, "ep": 4}, 8, "3 x 2", "1 or 2, or layout.dp_shard = 4"),
        (2, {"dp_replicate": 2, "ep": 2}, 8, "1 x 1", "1, or layout.dp_shard = 2"),
    ],
)
def test_impossible_splits_are_refused(
    ranks: int, layout: dict[str, Any], experts: int, message: str, hint: str
):
    spec = SPEC | {"experts": experts}
    job = Case("refused", ranks, layout, {"global_batch": 24, "micro_batch": 1}, spec=spec).job()
    (problem,) = check(job, [expert])
    assert problem.key == "layout.ep"
    assert message in problem.message
    assert problem.hint
    assert hint in problem.hint


def test_selective_recomputation_of_spread_and_sharded_experts_is_refused():
    (problem,) = check(CASES["ep 2, selective"].job(), [expert])
    assert problem.key == "training.recompute"
    assert "layout.ep = 2 and layout.zero = 3" in problem.message
    assert "layout.zero = 0" not in (problem.hint or ""), "dp_shard is not for zero = 0"
    layout = {"dp_shard": 1, "cp": 2, "ep": 2}
    over_cp = Case("over cp", 2, layout | {"zero": 1}, {"recompute": "selective"}).job()
    (problem,) = check(over_cp, [expert])
    assert "layout.zero = 0" in (problem.hint or "")
    assert check(Case("over cp", 2, layout | {"zero": 0}, {"recompute": "selective"}).job(), [expert]) == []


def test_possible_splits_are_not():
    for case in CASES.values():
        if case.training.get("recompute") != "selective":  # works here, where no experts are sharded
            assert check(case.job(), [expert]) == []
