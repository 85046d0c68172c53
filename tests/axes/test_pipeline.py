"""The pipeline axis on live ranks: gradients, messages, memory, and what is refused."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections import Counter
from functools import cache
from itertools import combinations, takewhile
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.axes import pipeline
from fivefold.axes.checks import check
from fivefold.axes.layout import Layout, Place
from fivefold.axes.stages import layer_counts, rank_of, stages, stages_of
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.ledger.ledger import Ledger
from fivefold.ledger.setup import Setup
from fivefold.models.decoder import Decoder
from fivefold.models.inventory import parameters
from fivefold.replay.account import account
from fivefold.training.build import Built
from fivefold.training.failures import RanksFailed
from fivefold.training.ranks import run_ranks
from fivefold.training.validation import release_gathered
from fivefold.verification import gradient_error
from tests.cases import SPEC, TIED, Case, batches, built_on_cpu, passes
from tests.ranks import on_ranks
from tests.tracer import MessageTracer

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev")
EIGHT = SPEC | {"layers": 8}
BATCH = {"global_batch": 16, "micro_batch": 2}
ROUNDING = 1e-11


def case(name: str, ranks: int, layout: dict[str, Any], spec: dict[str, Any] = SPEC, **training: Any) -> Case:
    return Case(name, ranks, layout, BATCH | training, spec=spec)


def cases_on_two() -> list[Case]:
    found = [case(schedule, 2, {"pp": 2, "schedule": schedule}) for schedule in SCHEDULES]
    for schedule in ("1f1b", "interleaved", "zero-bubble", "zbv"):
        found.append(case(f"{schedule} tied", 2, {"pp": 2, "schedule": schedule}, TIED))
    found.append(case("5 layers on 2", 2, {"pp": 2}, SPEC | {"layers": 5}))
    for mode, schedule in (
        ("full", "1f1b"),
        ("sqrt", "gpipe"),
        ("selective", "interleaved"),
        ("full", "zero-bubble"),
        ("selective", "zbv"),
    ):
        found.append(case(f"{schedule} {mode}", 2, {"pp": 2, "schedule": schedule}, recompute=mode))
    three = {"pp": 2, "schedule": "interleaved", "virtual_stages": 3}
    found.append(case("three stages each", 2, three, EIGHT))
    found.append(case("interleaved in uneven rounds", 2, {"pp": 2, "schedule": "interleaved"}, micro_batch=4))
    return found


def sharded(schedule: str, zero: int, spec: dict[str, Any] = SPEC) -> Case:
    layout = {"pp": 2, "schedule": schedule, "zero": zero, "dp_shard": 2}
    name = f"{schedule} zero{zero}" + (" tied" if spec is TIED else "")
    return case(name, 4, layout, spec)


def cases_on_four() -> list[Case]:
    found = [
        case("1f1b on 4", 4, {"pp": 4}, micro_batch=4),
        case("interleaved on 4", 4, {"pp": 4, "schedule": "interleaved"}, EIGHT, micro_batch=2),
        case("zbv on 4", 4, {"pp": 4, "schedule": "zbv"}, EIGHT | {"tied": True}),
        case("replicas", 4, {"pp": 2, "dp_replicate": 2, "zero": 0, "schedule": "zero-bubble"}),
        case("zero-bubble with tp", 4, {"pp": 2, "tp": 2, "schedule": "zero-bubble"}),
    ]
    for schedule, zero in (("1f1b", 3), ("1f1b", 1), ("interleaved", 1), ("zero-bubble", 3), ("zbv", 2)):
        found.append(sharded(schedule, zero))
    return found


def step_of(built: Built, taken: Any) -> dict[str, Any]:
    """Loss and every whole gradient of one step, and what the pipeline says of the same batch without one."""
    tokens = built.step.count_tokens(taken)
    loss = built.step.backward(taken, tokens)
    found = built.step.collect()
    total, _ = built.step.totals(loss, found)
    inputs = [built.step.inputs(batch) for batch in taken]
    evaluated = torch.zeros(())
    if built.step.pipeline is not None:
        evaluated, _ = built.step.totals(built.step.pipeline.evaluate(inputs) / tokens, found)
        release_gathered(built)
    gradients = {name: g.double() for name, g in built.weights.whole(found).items()}
    built.weights.clear_gradients()
    return {"loss": total.item(), "evaluated": evaluated.item(), "gradients": gradients}


def first_batches(job: Job, built: Built) -> Any:
    with batches(job, built) as loader:
        return next(iter(loader))


def live(world: World, jobs: list[Job]) -> list[dict[str, Any]]:
    """Each job twice, so that the second step sees what the first has left behind, and is traced."""
    found = []
    for job in jobs:
        built = built_on_cpu(job)
        taken = first_batches(job, built)
        first = step_of(built, taken)
        tracer = MessageTracer(built.mesh)
        with tracer:
            tokens = built.step.count_tokens(taken)
            loss = built.step.backward(taken, tokens)
            collected = built.step.collect()
        again = {name: g.double() for name, g in built.weights.whole(collected).items()}
        total, _ = built.step.totals(loss, collected)
        traffic = {key: count for key, count in tracer.traffic().items() if key[0] in ("send", "recv")}
        rounds = Counter(message.operation for message in tracer.seen if message.group == "dp_shard")
        before = takewhile(lambda message: message.group != "pp", tracer.seen)
        early = sum((message.operation, message.group) == ("all_gather", "dp_shard") for message in before)
        found.append(
            first
            | {"again": again, "loss again": total.item()}
            | {"traffic": traffic, "rounds": rounds, "early": early}
        )
    return found


@cache
def reference(key: tuple[Any, ...]) -> dict[str, Any]:
    spec, training = (dict(items) for items in key)
    job = Case("one process", 1, {}, training | {"recompute": "none"}, spec=spec).job()
    built = built_on_cpu(job)
    return step_of(built, first_batches(job, built))


def compare(cases: list[Case], ranks: int) -> None:
    jobs = [one.job() for one in cases]
    found = on_ranks(live, ranks, jobs)
    for index, one in enumerate(cases):
        expected = reference((tuple(sorted(one.spec.items())), tuple(sorted(one.training.items()))))
        seen = found[0][index]
        assert gradient_error(seen["gradients"], expected["gradients"])[0] <= ROUNDING, one.name
        assert gradient_error(seen["again"], expected["gradients"])[0] <= ROUNDING, one.name
        for loss in ("loss", "loss again", "evaluated"):
            assert seen[loss] == pytest.approx(expected["loss"], rel=ROUNDING), (one.name, loss)
        for rank in range(ranks):
            sent = account(jobs[index], Layout.of(jobs[index]).place(rank)).traffic()
            # The step's own sums are not traced; without other axes they are over pp too.
            expected_traffic = {key: count for key, count in sent.items() if key[0] in ("send", "recv")}
            assert found[rank][index]["traffic"] == expected_traffic, (one.name, rank)
            rounds = fsdp_rounds(jobs[index], rank)
            assert found[rank][index]["rounds"] == rounds, (one.name, rank)
            if not Setup.of(jobs[index]).frees_weights:
                # Weights that stay are gathered while the rank waits for its first micro-batch.
                assert found[rank][index]["early"] == rounds["all_gather"], (one.name, rank)


def fsdp_rounds(job: Job, rank: int) -> Counter[str]:
    """How often FSDP gathers and reduces on a rank: weights once a step if they are kept, else each time a
    micro-batch needs them (a block's twice, forward and backward); gradients once a step.
    """
    layout = Layout.of(job)
    if layout.zero == 0:
        return Counter()
    cut = stages(job)
    parts = [part for n in stages_of(job, layout.place(rank).pp) for part in cut[n]]
    blocks = sum(part.startswith("blocks") for part in parts)
    setup = Setup.of(job)
    gathers = int(setup.micro_batches) * (len(parts) + blocks) if setup.frees_weights else len(parts)
    return Counter({"all_gather": gathers, "reduce_scatter": len(parts)})


def test_two_ranks_compute_and_send_what_they_should() -> None:
    compare(cases_on_two(), 2)


@pytest.mark.slow
def test_four_ranks_compute_and_send_what_they_should() -> None:
    compare(cases_on_four(), 4)


# --- narrow precision --------------------------------------------------------------------------------------


def test_micro_batches_add_up_in_float32_where_backward_is_split() -> None:
    """Gradients of weights that are computed apart come past autograd's hooks, in bfloat16."""
    layouts = {"whole": (2, {"pp": 2}), "sharded": (4, {"pp": 2, "zero": 2, "dp_shard": 2})}
    for ranks, layout in layouts.values():
        plain, split = (
            case(schedule, ranks, layout | {"schedule": schedule}, precision="bf16").job()
            for schedule in ("looped-bfs", "zero-bubble")
        )
        found = on_ranks(live, ranks, [plain, split])[0]
        assert gradient_error(found[1]["gradients"], found[0]["gradients"])[0] < 1e-5


# --- autograd functions of our own --------------------------------------------------------------------------


class OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, -2).T @ x.flatten(0, -2)


class AddsToGradient(torch.autograd.Function):
    """As a balancing term does: its value counts for nothing, its gradient comes in on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return grads[0] + 1e-3, 1e-2 * weight


def use_own_functions(part: Decoder) -> None:
    """One weight is used at two places of each block, and others lie between them."""
    for block in part.blocks.values():
        up: Any = block.mlp.up  # type: ignore[union-attr]
        whole = block.forward
        up.forward = lambda x, up=up: OwnLinear.apply(x, up.weight)  # type: ignore[no-untyped-call]
        block.forward = lambda x, context, up=up, whole=whole: AddsToGradient.apply(  # type: ignore[assignment]
            whole(x, context),
            up.weight,  # type: ignore[no-untyped-call]
        )


def with_own_functions(world: World, jobs: list[Job]) -> list[dict[str, Any]]:
    found = []
    for job in jobs:
        built = built_on_cpu(job)
        for part in built.parts:
            use_own_functions(part)
        found.append(step_of(built, first_batches(job, built)))
    return found


def test_a_split_backward_copes_with_functions_of_our_own() -> None:
    cases = [
        case(schedule, 2, {"pp": 2, "schedule": schedule}) for schedule in ("1f1b", "zero-bubble", "zbv")
    ]
    expected = on_ranks(with_own_functions, 1, [Case("one", 1, {}, BATCH).job()])[0][0]
    found = on_ranks(with_own_functions, 2, [one.job() for one in cases])[0]
    for one, seen in zip(cases, found, strict=True):
        assert gradient_error(seen["gradients"], expected["gradients"])[0] <= ROUNDING, one.name


# --- memory -------------------------------------------------------------------------------------------------


class Kept:
    """A tensor that autograd keeps for backward."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def most_micro_batches_kept(world: World, jobs: list[Job]) -> list[int]:
    """Of how many micro-batches the rank's stage held activations at once, at most."""
    found = []
    for job in jobs:
        built = built_on_cpu(job)
        kept: dict[int, list[weakref.ref[Kept]]] = {}
        forwards: list[int] = []
        most = 0

        def pack(
            tensor: Tensor,
            kept: dict[int, list[weakref.ref[Kept]]] = kept,
            forwards: list[int] = forwards,
        ) -> Kept:
            thing = Kept(tensor)
            kept.setdefault(len(forwards), []).append(weakref.ref(thing))
            return thing

        def look(*unused: Any, kept: Any = kept, forwards: list[int] = forwards) -> None:
            nonlocal most
            most = max(most, sum(any(ref() is not None for ref in refs) for refs in kept.values()))
            forwards.append(1)

        built.parts[0].register_forward_hook(look)
        taken = first_batches(job, built)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda thing: thing.tensor):
            built.step.backward(taken, built.step.count_tokens(taken))
        found.append(most)
    return found


def test_a_stage_keeps_the_activations_that_its_schedule_says() -> None:
    ranks, count = 4, 6
    names = ("naive", "gpipe", "1f1b")
    jobs = [
        case(name, ranks, {"pp": ranks, "schedule": name}, global_batch=count, micro_batch=1).job()
        for name in names
    ]
    found = on_ranks(most_micro_batches_kept, ranks, jobs)
    assert [kept[0] for kept in found] == [1] * ranks
    assert [kept[1] for kept in found] == [count] * ranks
    assert [kept[2] for kept in found] == [min(count, ranks - rank) for rank in range(ranks)]


# --- a rank that dies ---------------------------------------------------------------------------------------


def dies_in_the_middle(world: World, job: Job) -> None:
    built = built_on_cpu(job)
    seen: list[int] = []

    def die(*unused: Any) -> None:
        seen.append(1)
        if world.rank == 1 and len(seen) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    built.parts[0].register_forward_hook(die)
    taken = first_batches(job, built)
    built.step.backward(taken, built.step.count_tokens(taken))


def test_a_rank_that_is_killed_in_a_step_is_named_within_seconds() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 failed: Killed"):
        run_ranks(dies_in_the_middle, 2, case("killed", 2, {"pp": 2}).job())
    assert time.monotonic() - start < 20


# --- stages -------------------------------------------------------------------------------------------------


def test_no_other_cut_has_a_faster_slowest_stage() -> None:
    for layers in range(2, 10):
        for several in range(2, min(layers, 5) + 1):
            for head in (0.0, 0.3, 1.0, 2.5, 20.0):
                cuts = combinations(range(1, layers), several - 1)
                every = [[b - a for a, b in zip((0, *cut), (*cut, layers), strict=True)] for cut in cuts]
                best = min(max(*counts[:-1], counts[-1] + head) for counts in every)
                found = layer_counts(layers, several, head)
                assert (len(found), sum(found)) == (several, layers)
                assert min(found) >= 1
                assert max(*found[:-1], found[-1] + head) == best


def test_a_large_vocabulary_takes_layers_off_the_last_stage() -> None:
    job = case("vocabulary", 2, {"pp": 2}, SPEC | {"vocab_size": 1024}).job()
    first, last = stages(job)
    assert first == ["embedding", "blocks.0", "blocks.1", "blocks.2"]
    assert last == ["blocks.3", "head"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_part_is_in_one_stage_and_every_stage_on_one_rank(schedule: str) -> None:
    job = case(schedule, 2, {"pp": 2, "schedule": schedule}, EIGHT).job()
    cut = stages(job)
    assert [part for parts in cut for part in parts] == list(
        dict.fromkeys(p.part for p in parameters(job.spec))
    )
    everywhere = [number for position in range(2) for number in stages_of(job, position)]
    assert sorted(everywhere) == list(range(len(cut)))
    for position in range(2):
        assert all(rank_of(job, number) == position for number in stages_of(job, position))


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "training", "key", "words"),
    [
        ({"pp": 8}, {"micro_batch": 1}, "layout.pp", ["8 stages", "4 layers", "layout.pp = 4"]),
        (
            {"pp": 4, "schedule": "interleaved"},
            {},
            "layout.pp",
            ["8 stages", "layout.pp = 2", "layout.virtual_stages = 1", "model.layers = 8"],
        ),
        (
            {"pp": 4},
            {"micro_batch": 8},
            "training.global_batch",
            ["2 micro-batches", "at least 4", "training.global_batch = 32", "training.micro_batch = 4"],
        ),
        (
            {"pp": 2, "schedule": "dualpipev"},
            {"micro_batch": 16},
            "training.global_batch",
            ["1 micro-batches", "at least 4", "training.micro_batch = 4"],
        ),
        (
            {"pp": 2, "schedule": "interleaved"},
            {"global_batch": 14},
            "training.global_batch",
            ["7 micro-batches", "multiple of 3", "training.global_batch = 12", "training.global_batch = 16"],
        ),
        ({"pp": 2, "virtual_stages": 2}, {}, "layout.virtual_stages", ["one stage", "virtual_stages = 1"]),
        (
            {"pp": 2, "schedule": "zbv", "virtual_stages": 1},
            {},
            "layout.virtual_stages",
            ["2 stages", "virtual_stages = 2"],
        ),
        (
            {"pp": 2, "dp_shard": 2, "zero": 2, "reduce": "micro-batch"},
            {},
            "layout.reduce",
            ["once per step"],
        ),
    ],
)
def test_impossible_pipelines_are_refused_with_the_number_to_change(
    layout: dict[str, Any], training: dict[str, Any], key: str, words: list[str]
) -> None:
    ranks = layout["pp"] * layout.get("dp_shard", 1)
    problems = check(case("refused", ranks, layout, **training).job(), [pipeline])
    assert [problem.key for problem in problems] == [key]
    for word in words:
        assert word in str(problems[0])


@pytest.mark.parametrize("one", [*cases_on_two(), *cases_on_four()], ids=lambda one: one.name)
def test_what_runs_is_not_refused(one: Case) -> None:
    assert check(one.job(), [pipeline]) == []


def test_without_a_pipeline_nothing_is_checked_or_sent() -> None:
    job = Case("one", 1).job()
    assert check(job, [pipeline]) == []
    assert passes(job, Place(), "pp") == Ledger()
