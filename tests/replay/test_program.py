"""The plan is the program: a traced step holds and does what the planner says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fivefold.axes.layout import Layout
from fivefold.config import Job, dump_toml, load, resolve
from fivefold.ledger.setup import Setup, segment_length
from fivefold.planner.memory.our_tensors import rank_tensors
from fivefold.planner.memory.stage import Sizes, Stage
from fivefold.planner.placement import ours
from fivefold.planner.request import Request
from fivefold.replay.account import account
from fivefold.replay.activations import block_activations, embedding_activations, head_activations
from fivefold.replay.operations import INTEGER
from fivefold.schedules import SCHEDULES
from tests.axes.layouts import MOE
from tests.cases import GEMMA, SPEC, TIED, Case
from tests.traced import Traced, traced, traces

NEAR = 0.03
"""How far the peak may be off."""

QK = SPEC | {"qk_norm": True, "parallel_block": True}
MANY = {"vocab_size": 4099}
LARGER = {"dim": 64, "ffn": 160, "max_seq_len": 128}
SPECS = {
    "llama": SPEC,
    "gpt2": TIED,
    "experts": MOE,
    "qk": QK,
    "gemma": GEMMA,
    "gemma in fp32": GEMMA,
    "llama of many words": SPEC | MANY,
    "gpt2 of many words": TIED | MANY,
}
PRECISION = {"llama": "fp32", "gemma in fp32": "fp32", "llama of many words": "fp32"}
"""Of the others: bf16."""
TRAINED = [name for name, schedule in SCHEDULES.items() if schedule.use != "planning"]
PP = 2


def cases() -> dict[str, tuple[Case, int]]:
    """Every axis, ZeRO stage, recompute mode and schedule; composed layouts."""
    found: list[tuple[str, dict[str, Any], dict[str, Any], int]] = []
    for model in ("llama", "gpt2", "qk", "experts"):
        for mode in ("none", "full", "every-2", "sqrt", "selective"):
            found.append((model, {}, {"recompute": mode}, 0))
    for model in ("llama", "gpt2"):
        found.append((model, {"dp_replicate": 2}, {}, 0))
        for zero in (1, 2, 3):
            found.append((model, {"dp_shard": 2, "zero": zero}, {}, 0))
        found.append((model, {"dp_replicate": 2, "dp_shard": 2, "zero": 3}, {"micro_batch": 1}, 1))
        for mode in ("full", "every-2", "selective"):
            found.append((model, {"dp_shard": 2, "zero": 3}, {"recompute": mode}, 0))
            found.append((model, {"tp": 2}, {"recompute": mode}, 0))
        found.append((model, {"tp": 4}, {"micro_batch": 1}, 0))
        found.append((model, {"tp": 2, "sequence_parallel": False}, {}, 0))
        for kind in ("ring", "allgather", "ulysses"):
            found.append((model, {"cp": 2, "cp_kind": kind}, {}, 0))
        found.append((model, {"dp_shard": 2, "tp": 2, "zero": 3}, {"recompute": "full"}, 0))
        found.append((model, {"dp_shard": 2, "cp": 2, "zero": 3}, {}, 0))
        found.append((model, {"cp": 2, "tp": 2, "cp_kind": "ulysses"}, {}, 0))
        found.append((model, {"pp": PP, "tp": 2}, {"micro_batch": 1, "recompute": "full"}, 2))
        for zero in (1, 2, 3):
            for schedule, counts in {"1f1b": (2, 3), "gpipe": (1,), "interleaved": (2, 4)}.items():
                for count in counts:
                    short = {"micro_batch": 1, "global_batch": 2 * count}
                    layout = {"pp": PP, "dp_shard": 2, "zero": zero, "schedule": schedule}
                    found.append((model, layout, short, 2 * (count % 2)))
    for kind in ("ring", "allgather", "ulysses"):
        found.append(("llama", {"cp": 4, "cp_kind": kind}, {"recompute": "full"}, 1))
    found.append(("gpt2", {"cp": 2, "cp_kind": "ring"}, {"recompute": "selective"}, 1))
    for schedule in TRAINED:
        for count in range(1, 2 * PP + 1):
            if SCHEDULES[schedule].allows(PP, count):
                short = {"micro_batch": 1, "global_batch": count}
                found.append(("llama", {"pp": PP, "schedule": schedule}, short, count % 2))
        found.append(("gpt2", {"pp": PP, "schedule": schedule}, {"micro_batch": 1}, 0))
    for model in ("llama of many words", "gpt2 of many words"):
        found.append((model, {"dp_shard": 2, "zero": 1}, {}, 0))
        found.append((model, {"pp": PP, "dp_shard": 2, "zero": 1}, {"micro_batch": 1}, 2))
        for schedule in ("zbv", "dualpipev"):
            for rank in range(PP):
                short = {"micro_batch": 1, "global_batch": 4}
                found.append((model, {"pp": PP, "schedule": schedule}, short, rank))
    for zero in (1, 3):
        found.append(("experts", {"dp_shard": 2, "ep": 2, "zero": zero}, {}, 0))
        found.append(("experts", {"dp_shard": 4, "ep": 2, "zero": zero}, {"recompute": "full"}, 0))
        more = {"pp": PP, "dp_shard": 4, "ep": 2, "zero": zero}
        found.append(("experts", more, {"micro_batch": 1, "recompute": "full"}, 0))
    found.append(("experts", {"tp": 2}, {}, 0))
    found.append(("experts", {"cp": 2, "ep": 2}, {}, 0))
    found.append(("experts", {"pp": PP}, {"micro_batch": 1}, 1))
    found.append(("experts", {"pp": PP, "schedule": "zbv"}, {"micro_batch": 1}, 0))
    for mode in ("none", "full", "selective"):
        found.append(("gemma", {}, {"recompute": mode}, 0))
        found.append(("gemma", {"tp": 2}, {"recompute": mode}, 0))
    found.append(("gemma", {"dp_shard": 2, "zero": 3}, {"recompute": "full"}, 0))
    found.append(("gemma", {"tp": 2, "sequence_parallel": False}, {}, 0))
    found.append(("gemma", {"cp": 2, "cp_kind": "ulysses"}, {}, 0))
    found.append(("gemma", {"pp": PP, "dp_shard": 2, "zero": 1}, {"micro_batch": 1}, 2))
    for model in ("gemma", "gemma in fp32"):
        found.append((model, {"pp": PP, "schedule": "zbv"}, {"micro_batch": 1, "global_batch": 4}, 0))
    found.append(("gemma in fp32", {}, {"seq_len": 64}, 0))
    found.append(("gemma in fp32", {"tp": 2}, {"recompute": "every-2"}, 0))
    chunks = {"loss_chunk": 12}
    for model in ("llama of many words", "gpt2 of many words", "gemma", "gemma in fp32"):
        found.append((model, {}, chunks, 0))
        found.append((model, {"tp": 2}, chunks, 0))
    for model in ("llama of many words", "gpt2 of many words"):
        found.append((model, {}, {"loss_chunk": 1000}, 0))
        found.append((model, {"tp": 2, "sequence_parallel": False}, chunks, 0))
        found.append((model, {"dp_shard": 2, "zero": 1}, chunks, 0))
        found.append((model, {"dp_shard": 2, "zero": 3}, chunks, 0))
        found.append((model, {"cp": 2, "cp_kind": "ulysses"}, chunks, 0))
        for schedule in ("1f1b", "gpipe", "zbv", "zero-bubble"):
            short = {"micro_batch": 1, "global_batch": 4, "loss_chunk": 50}
            found.append((model, {"pp": PP, "schedule": schedule}, short, 0 if schedule == "zbv" else 1))
    named = {}
    for model, layout, training, rank in found:
        words = " ".join(f"{k}={v}" for k, v in {**layout, **training}.items() if v != "none")
        name = f"{model}: {words or 'one process'}, rank {rank}"
        named[name] = _case(name, model, layout, training), rank
    return named


def _case(name: str, model: str, layout: dict[str, Any], training: dict[str, Any]) -> Case:
    ranks = 1
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
        ranks *= layout.get(axis, 1)
    full: dict[str, Any] = {"dp_replicate": 1, "dp_shard": 1, "bucket_mb": 0.02} | layout
    size: int = training.get("micro_batch", 2)
    # The first micro-batch of a rank, the last, and one between; of a pipeline likewise.
    batch = 3 * size * full.get("pp", 1) * full["dp_replicate"] * full["dp_shard"]
    usual = {"micro_batch": size, "global_batch": batch, "precision": PRECISION.get(model, "bf16")}
    training = usual | training
    if model == "experts":
        training["routing"] = "balanced"
    spec = SPECS[model]
    if "pp" in layout:  # where small tensors that are not counted weigh less
        spec, training = spec | LARGER, {"seq_len": 128} | training
    return Case(name, ranks, full, training, spec=spec)


CASES = cases()
FAST = (
    "llama: recompute=selective, rank 0",
    "gpt2: one process, rank 0",
    "llama: dp_shard=2 zero=3, rank 0",
    "llama: dp_shard=2 zero=3 recompute=every-2, rank 0",
    "gpt2: tp=2 recompute=full, rank 0",
    "llama: cp=2 cp_kind=ring, rank 0",
    "gemma: tp=2 recompute=full, rank 0",
    "gpt2 of many words: loss_chunk=12, rank 0",
    "llama of many words: tp=2 loss_chunk=12, rank 0",
    "gpt2 of many words: pp=2 schedule=zero-bubble micro_batch=1 global_batch=4 loss_chunk=50, rank 1",
    "gemma in fp32: seq_len=64, rank 0",
    "llama: pp=2 schedule=1f1b micro_batch=1 global_batch=4, rank 0",
    "gpt2 of many words: pp=2 schedule=zbv micro_batch=1 global_batch=4, rank 0",
    "experts: dp_shard=2 ep=2 zero=1, rank 0",
)


Trace = Callable[[str], Traced]


@pytest.fixture(scope="module")
def trace(request: pytest.FixtureRequest) -> Iterator[Trace]:
    """What is traced of a case: of all that are to be tested, under way beside each other."""
    params = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = dict.fromkeys(spec.params["name"] for spec in params if spec is not None)
    with traces({name: (case.job(), rank) for name, (case, rank) in CASES.items() if name in names}) as found:
        yield found


def over(names: Iterable[str]) -> pytest.MarkDecorator:
    """A test of each of these cases; of most, a slow one."""
    fast_or_slow = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", fast_or_slow)


@over(CASES)
def test_tensors_of_a_step(name: str, trace: Trace) -> None:
    case, rank = CASES[name]
    job = case.job()
    planned = rank_tensors(Setup.of(job), Layout.of(job).place(rank).pp, "cpu")
    assert planned.allocated == pytest.approx(trace(name).peak, rel=NEAR)


@pytest.mark.parametrize("name", [name for name in FAST if "zero=3" in name])
def test_the_most_in_a_forward_pass(name: str, trace: Trace) -> None:
    """With weights that are freed: a block's, gathered with what they lie in, and the next one's."""
    case, _ = CASES[name]
    setup, found = Setup.of(case.job()), trace(name)
    stage = Stage(setup, Sizes.of(setup, "cpu"), ours(setup, 1)[0], hands_on=False, waits=False)
    needed = float(stage.needs("forward", first=True, last=False, stays=False))
    assert needed == pytest.approx(found.first - found.rest, rel=NEAR)


@over(name for name, (case, _) in CASES.items() if "pp" not in case.layout)  # of them it is one stage's
def test_saved_for_backward(name: str, trace: Trace) -> None:
    case, _ = CASES[name]
    job, found = case.job(), trace(name)
    setup = Setup.of(job)
    # Tokens and targets are the loader's, and not counted; tp ranks keep a copy of the tokens.
    given = INTEGER * int(setup.tokens) * (1 if job.layout.tp > 1 else 2)
    if job.layout.cp == 1:
        assert saved(job, "cpu") - given == found.saved
    else:  # some kinds copy their part of the batch, and of positions
        assert saved(job, "cpu") == pytest.approx(found.saved, abs=given + INTEGER * setup.seq_len)
    if job.training.recompute == "none" and job.spec.experts is None and job.layout.zero != 3:
        # Recomputation and expert layers keep tensors past autograd's books; gathered weights are in them.
        assert found.kept == found.saved


def saved(job: Job, device: str) -> float:
    """What the parts of the model keep of a micro-batch, without a pipeline."""
    setup, layers = Setup.of(job), job.spec.layers
    length = segment_length(setup.recompute, layers) or 1
    segments = [min(length, layers - start) for start in range(0, layers, length)]
    blocks = [block_activations(setup, device, count) for count in segments]
    ends = embedding_activations(setup, device), head_activations(setup, device)
    return float(sum(part.saved for part in (*ends, *blocks)))


@over(CASES)
def test_flops(name: str, trace: Trace) -> None:
    case, rank = CASES[name]
    job = case.job()
    assert int(account(job, Layout.of(job).place(rank)).flops) == trace(name).flops


def test_the_fast_cases_exist() -> None:
    assert set(FAST) <= set(CASES)


def test_a_planned_job_holds_what_was_planned(tmp_path: Path) -> None:
    """With documents apart as the job has them: on a CPU that takes a mask, not replayed."""
    asked = Request(model="tiny", hf=None, cluster="laptop", gpus="4", seq_len=128, global_batch=8)
    found = asked.answer()
    assert found.best is not None
    (tmp_path / "job.toml").write_text(dump_toml(asked.job(found)))
    job = resolve(load(str(tmp_path / "job.toml")), 4)
    assert job.data.separate_documents
    peak = traced(job, documents=3).peak
    assert found.row(found.best)["memory_gib"] * 2**30 == pytest.approx(peak, rel=NEAR)
