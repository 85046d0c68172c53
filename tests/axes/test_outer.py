"""Outer steps as the ledger has them: every message and what is kept."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.axes.messages import Traffic
from fivefold.axes.outer import fragment_of
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.ledger.ledger import repeated
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameter_count, parameters
from fivefold.replay.account import account
from tests.cases import TIED, batches, built_on_cpu
from tests.ranks import on_ranks
from tests.tracer import MessageTracer
from tests.training.replica_cases import CASES, LATE, MOE, PLAIN, TURNS, case


def traced(world: World, job: Job, rounds: int) -> dict[str, Any]:
    """What a rank sent in some rounds, after the first, and keeps for outer steps."""
    built, tracer = built_on_cpu(job), None
    each = job.communication.local_steps
    tracer = MessageTracer(built.mesh)
    with batches(job, built) as loader:
        for step in range(1, each + 1):
            built.step(next(loader), 1e-3, step)
        with tracer:
            for step in range(each + 1, (rounds + 1) * each + 1):
                built.step(next(loader), 1e-3, step)
    assert built.outer is not None
    kept = [*built.outer.anchors, *(built.outer.momenta or [])]
    return {
        "traffic": tracer.traffic(),
        "kept": sum(tensor.nbytes for tensor in kept),
        "place": built.mesh.place,
    }


ACCOUNTED = {
    "plain": case("", 2, {"zero": 0}, PLAIN),
    "bf16": case(
        "",
        2,
        {"zero": 0, "bucket_mb": 0.02},
        {**TURNS, "outer_momentum": 0.0},
        training={"precision": "bf16"},
    ),
    "int8": case("", 2, {"zero": 0}, {**PLAIN, "compress": "int8"}, training={"precision": "fp32"}),
    "zero 3": case("", 4, {"dp_shard": 2, "zero": 3, "bucket_mb": 0.02}, TURNS),
    "zero 1 tp": case("", 8, {"dp_shard": 2, "tp": 2, "zero": 1}, PLAIN),
    "cp": case("", 4, {"cp": 2, "zero": 0}, LATE),
    "pp tied": case("", 4, {"pp": 2, "zero": 0}, TURNS, spec=TIED, training={"micro_batch": 2}),
    "muon": case("", 2, {"zero": 0}, PLAIN, optimizer={"name": "muon"}),
    "muon zero 3": case("", 4, {"dp_shard": 2, "zero": 3}, TURNS, optimizer={"name": "muon"}),
    "experts": case("", 8, {"dp_shard": 4, "ep": 2}, PLAIN, spec=MOE, training={"routing": "balanced"}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if c.ranks > 2 else []) for n, c in ACCOUNTED.items()]
)
def test_the_ledger_knows_every_message_and_what_is_kept(name: str) -> None:
    job = ACCOUNTED[name].job()
    job = job.model_copy(update={"training": job.training.model_copy(update={"steps": 16})})
    rounds = 2
    for found in on_ranks(traced, ACCOUNTED[name].ranks, job, rounds):
        ledger = account(job, found["place"])
        assert found["traffic"] == ledger.traffic(rounds * job.communication.local_steps)
        kept = [line for line in ledger.held if line.what == "outer weights and momentum"]
        assert [line.rest for line in kept] == [found["kept"]]


def test_nothing_of_an_inner_step_leaves_the_replica() -> None:
    job = ACCOUNTED["zero 3"].job()
    crossing = [line for line in account(job).messages if "dp_replicate" in line.group]
    assert crossing
    assert all(line.count <= 2 / 4 for line in crossing)


@pytest.mark.parametrize("fragments", [2, 4])
def test_fragments_are_about_as_large_as_each_other(fragments: int) -> None:
    spec = CASES["plain"].job().spec
    where = fragment_of(spec, fragments)
    sizes = [sum(p.count for p in parameters(spec) if where[p.name] == f) for f in range(fragments)]
    assert sum(sizes) == parameter_count(spec)
    assert max(sizes) < 1.1 * parameter_count(spec) / fragments


@pytest.mark.parametrize("name", ACCOUNTED)
def test_messages_of_parts_are_those_of_a_rank(name: str) -> None:
    """As a search sees them: as many bytes between replicas, but for the padding of 8-bit blocks."""
    job = ACCOUNTED[name].job()
    parts = Traffic(Setup.of(job))
    counts = {"embedding": 1, "block": job.spec.layers // job.layout.pp, "head": int(job.layout.pp == 1)}
    of_parts = [*parts.step, *(m for part, ms in parts.state.items() for m in repeated(ms, counts[part]))]
    found, expected = (
        sum(float(m.payload * m.count) for m in messages if m.group == "dp_replicate")
        for messages in (of_parts, account(job).messages)
    )
    assert found == pytest.approx(expected, rel=0.2 if "compress" in ACCOUNTED[name].communication else 1e-12)
