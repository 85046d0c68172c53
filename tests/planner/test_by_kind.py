"""A step by kinds of work: nothing is lost, nothing counts twice, and kinds are those of a profile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from fivefold.config import Job, load, resolve
from fivefold.hardware.cluster import Cluster, find_cluster
from fivefold.ledger.setup import Setup
from fivefold.ledger.work import block_work, embedding_work, head_work
from fivefold.planner.play.by_kind import by_kind
from fivefold.planner.play.step_time import breakdown
from fivefold.planner.time.parts import Costs
from fivefold.planner.time.rates import work_time
from fivefold.watch.kinds import KINDS
from tests.planner.drawn import clusters, layouts

CLUSTER = find_cluster("dgx-h100")
COMPUTED = ("products", "attention", "norms", "loss")


def costs_of(ranks: int, *words: str) -> Costs:
    job: Job = load(None, "llama3-8b", ["--training.seq_len=4096", "--training.global_batch=64", *words])
    return Costs.of(Setup.of(resolve(job, ranks, "cuda")), CLUSTER)


@settings(max_examples=40, deadline=None)
@given(layouts(), clusters())
def test_kinds_of_every_rank_add_up_to_the_step_that_is_planned(setup: Setup, cluster: Cluster) -> None:
    costs = Costs.of(setup, cluster)
    took = breakdown(costs)
    for rank in {0, int(setup.pp) - 1}:
        found = by_kind(costs, rank)
        assert found.step_time == took.step_time
        assert sum(found.kinds.values()) == pytest.approx(took.step_time, rel=1e-12)
        assert min(found.kinds.values()) >= -1e-9 * took.step_time
        assert found.kinds.keys() <= KINDS.keys()


@pytest.mark.parametrize(
    "words",
    [
        ("--layout.zero=3",),
        ("--layout.tp=8",),
        ("--layout.cp=4",),
        ("--layout.zero=3", "--training.recompute=full"),
        ("--layout.zero=1", "--training.compile=true"),
    ],
    ids=" ".join,
)
def test_without_a_pipeline_the_rest_of_the_breakdown_is_computing_and_starting_kernels(
    words: tuple[str, ...],
) -> None:
    costs = costs_of(8, *words)
    took, kinds = breakdown(costs), by_kind(costs).kinds
    assert kinds["optimizer"] == took.optimizer
    assert kinds["messages"] == pytest.approx(sum(took.exposed.values()))
    assert sum(kinds[kind] for kind in COMPUTED) + kinds["idle"] == pytest.approx(took.compute + took.bubble)


def test_each_kind_is_the_time_of_its_operations() -> None:
    costs = costs_of(8, "--layout.zero=3", "--training.micro_batch=1")
    setup = costs.setup
    expected = dict.fromkeys(COMPUTED, 0.0)
    for count, work in ((1, embedding_work(setup)), (32, block_work(setup)), (1, head_work(setup))):
        for item in work:
            kind = {"matmul": "products", "attention": "attention"}.get(item.kind, "norms")
            kind = "loss" if item.what == "loss" else kind
            seconds = work_time(item, CLUSTER, "bfloat16", costs.stack, costs.constants)
            expected[kind] += 8 * count * float(seconds)  # micro-batches
    kinds = by_kind(costs).kinds
    assert {kind: kinds[kind] for kind in COMPUTED} == pytest.approx(expected)


def test_recomputation_adds_what_it_repeats_to_the_kind_of_it() -> None:
    words = ("--layout.zero=3", "--training.micro_batch=1")
    once, again = (
        by_kind(costs_of(8, *words, f"--training.recompute={how}")).kinds for how in ("none", "full")
    )
    costs = costs_of(8, *words)
    # Backward needs a block's last product's input, not its result.
    forward = [w for w in block_work(costs.setup) if (w.kind, w.phase) == ("matmul", "forward")]
    more = sum(
        8 * 32 * float(work_time(item, CLUSTER, "bfloat16", costs.stack, costs.constants))
        for item in forward
        if item.what != "mlp.down"
    )
    assert again["products"] - once["products"] == pytest.approx(more)
    assert again["attention"] > once["attention"]
    assert again["loss"] == once["loss"]


def test_a_rank_of_a_pipeline_has_what_it_holds_and_waits_for_the_busiest() -> None:
    """The last one computes the head, and nobody else does."""
    costs = costs_of(4, "--layout.pp=4", "--training.micro_batch=1")
    first, last = by_kind(costs, 0), by_kind(costs, 3)
    assert first.kinds["loss"] == 0
    assert last.kinds["loss"] > 0
    assert last.kinds["products"] > first.kinds["products"]
    assert first.kinds["idle"] > last.kinds["idle"]
    assert first.step_time == last.step_time


def test_host_time_that_kernels_do_not_fill_is_idle() -> None:
    """With a host that is a thousand times slower nothing but that changes."""
    costs = costs_of(8, "--layout.zero=3", "--training.micro_batch=1")
    slow = replace(costs, constants=replace(costs.constants, launch=1000 * costs.constants.launch))
    quick, waiting = by_kind(costs).kinds, by_kind(slow).kinds
    assert {kind: waiting[kind] for kind in COMPUTED} == {kind: quick[kind] for kind in COMPUTED}
    assert waiting["idle"] > 10 * sum(quick[kind] for kind in COMPUTED)
