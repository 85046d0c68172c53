"""`verify` must say "same" for every good layout, and name the axis when a bug is planted in it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule

import fivefold.verification
from fivefold.axes import data as data_axis
from fivefold.axes.layout import Layout
from fivefold.axes.pieces import Piece
from fivefold.axes.pieces import copies as real_copies
from fivefold.axes.runtime import tensor_layers
from fivefold.axes.runtime.mesh import Mesh
from fivefold.axes.runtime.pipeline_runner import Pipeline
from fivefold.axes.runtime.tensor_layers import Stream
from fivefold.comm.buckets import BucketedAllReduce
from fivefold.comm.world import World
from fivefold.config import Job
from fivefold.models.inventory import parameter_count
from fivefold.models.moe import Experts
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.training.failures import RanksFailed
from fivefold.training.late_sums import LateSums
from fivefold.training.step import Step
from fivefold.verification import (
    Computed,
    Verdict,
    compute,
    gradient_error,
    on_one_process,
    shrink,
    shrink_spec,
    verify,
)
from tests.cases import SPEC, TIED, Case

# --- good layouts ------------------------------------------------------------------------------------------

GOOD = {
    case.name: case
    for case in (
        Case("zero0", 2, {"zero": 0}, {"micro_batch": 2}),
        Case("zero3 recomputed", 2, {"zero": 3}, {"recompute": "every-3"}),
        Case("hsdp", 4, {"zero": 2, "dp_replicate": 2, "dp_shard": 2}, {"micro_batch": 1}, spec=TIED),
    )
}
MORE = {
    case.name: case
    for case in (
        Case("zero1", 2, {"zero": 1}, {"micro_batch": 2}),
        Case("zero2 by step", 2, {"zero": 2, "reduce": "step"}, {"micro_batch": 2}),
        Case("zero3 on 4", 4, {"zero": 3}, spec=TIED),
        Case("one process", 1, {}, {"micro_batch": 2, "recompute": "selective"}),
    )
}


def assert_same(case: Case) -> None:
    verdict = verify(case.job(), case.ranks)
    assert verdict.ok, verdict.sentence()
    assert verdict.axis is None
    assert verdict.worst_gradient_error < 1e-12
    assert verdict.parameters == len(compute_shrunken(case).gradients)
    assert verdict.sentence().startswith("same (worst ")


def compute_shrunken(case: Case) -> Computed:
    world = World(0, 1, 0, torch.device("cpu"), "single")
    return compute(world, on_one_process(shrink(case.job())))


@pytest.mark.parametrize("name", GOOD)
def test_good_layouts_are_the_same(name: str) -> None:
    assert_same(GOOD[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_good_layouts_are_the_same(name: str) -> None:
    assert_same(MORE[name])


# --- planted bugs ------------------------------------------------------------------------------------------


def every_rank_gets_the_same_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mesh, "data_rank", property(lambda mesh: 0))


def replicas_get_the_same_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mesh, "data_rank", property(lambda mesh: mesh.place.dp_shard))


def gradients_are_averaged_over_shards(patch: pytest.MonkeyPatch) -> None:
    real = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda module, factor: real(module, 2.0))


def replicas_are_not_reduced(patch: pytest.MonkeyPatch) -> None:
    """Only FSDP waits for an all-reduce in a group that is not all ranks."""
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if "group" in options and not options.get("async_op"):
            return None
        return real(tensor, *args, **options)

    patch.setattr(dist, "all_reduce", all_reduce)


def replicas_never_come_together(patch: pytest.MonkeyPatch) -> None:
    real = FSDPModule.set_requires_all_reduce
    patch.setattr(FSDPModule, "set_requires_all_reduce", lambda module, needed: real(module, False))


def one_bucket_is_not_reduced(patch: pytest.MonkeyPatch) -> None:
    real = BucketedAllReduce.finish

    def finish(self: BucketedAllReduce) -> None:
        _, flight = self._flights[1]
        flight.result().div_(2)
        real(self)

    patch.setattr(BucketedAllReduce, "finish", finish)


def the_norm_forgets_other_ranks(patch: pytest.MonkeyPatch) -> None:
    from fivefold.training.norm import local_norm

    real = Step.totals

    def totals(self: Step, loss: torch.Tensor, gradients: list[torch.Tensor]) -> Any:
        return real(self, loss, gradients)[0], local_norm(gradients)

    patch.setattr(Step, "totals", totals)


def gradients_are_not_summed_over_cp(patch: pytest.MonkeyPatch) -> None:
    real = data_axis.replicated_buckets

    def buckets(job: Job, mine: Any) -> Any:
        return [] if job.layout.cp > 1 else real(job, mine)

    patch.setattr(data_axis, "replicated_buckets", buckets)


def losses_are_not_divided_by_micro_batches(patch: pytest.MonkeyPatch) -> None:
    real = Pipeline.step

    def step(self: Pipeline, inputs: Any, divisor: Any, scale: float) -> torch.Tensor:
        return real(self, inputs, divisor / len(inputs), scale)

    patch.setattr(Pipeline, "step", step)


def tied_weights_are_untied(patch: pytest.MonkeyPatch) -> None:
    """The stages' copies of the embedding never hear of each other's gradients."""
    real = LateSums.__init__

    def init(self: LateSums, mine: Any, mesh: Mesh) -> None:
        real(self, mine, mesh)
        self.shared = []

    patch.setattr(LateSums, "__init__", init)


def a_bias_is_added_by_every_tp_rank(patch: pytest.MonkeyPatch) -> None:
    def row(stream: Stream, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return stream.leave(torch.nn.functional.linear(x, weight, bias))

    patch.setattr(tensor_layers, "row", row)


def the_norm_counts_copies_twice(patch: pytest.MonkeyPatch) -> None:
    def copies(piece: Piece, layout: Layout) -> int:
        return real_copies(piece, layout) // (layout.tp if piece.partial else 1)

    patch.setattr("fivefold.training.step.copies", copies)


def experts_are_averaged_over_ep(patch: pytest.MonkeyPatch) -> None:
    real = FSDPModule.set_gradient_divide_factor

    def set_factor(module: Any, factor: float) -> None:
        real(module, 2.0 if isinstance(module, Experts) else factor)

    patch.setattr(FSDPModule, "set_gradient_divide_factor", set_factor)


def compute_with_bug(plant: Callable[[pytest.MonkeyPatch], None], world: World, job: Job) -> Computed:
    """As `compute`, with a bug in every layout of more than one process."""
    with pytest.MonkeyPatch.context() as patch:
        if world.size > 1:
            plant(patch)
        return compute(world, job)


def verdict_on(
    plant: Callable[[pytest.MonkeyPatch], None], case: Case, monkeypatch: pytest.MonkeyPatch
) -> Verdict:
    monkeypatch.setattr(fivefold.verification, "compute", partial(compute_with_bug, plant))
    verdict = verify(case.job(), case.ranks)
    assert not verdict.ok
    assert verdict.axis is not None
    return verdict


BUCKETS = {"zero": 0, "bucket_mb": 0.02}
HSDP = {"zero": 3, "dp_replicate": 2, "dp_shard": 2}


@pytest.mark.parametrize(
    ("plant", "layout", "axis"),
    [
        (every_rank_gets_the_same_data, {"zero": 3}, "dp_shard"),
        (every_rank_gets_the_same_data, {"zero": 0}, "dp_replicate"),
        (gradients_are_averaged_over_shards, {"zero": 2}, "dp_shard"),
        (one_bucket_is_not_reduced, BUCKETS, "dp_replicate"),
    ],
)
def test_a_planted_bug_is_found(plant: Any, layout: Any, axis: str, monkeypatch: Any) -> None:
    verdict = verdict_on(plant, Case("bug", 2, layout, {"micro_batch": 2}), monkeypatch)
    assert verdict.axis == axis
    assert verdict.worst_gradient_error > 1e-3
    assert verdict.worst_parameter in verdict.sentence()
    assert f"axis: {axis}" in verdict.sentence()


def test_a_bug_in_the_norm_alone_is_found_and_told_as_such(monkeypatch: Any) -> None:
    case = Case("bug", 2, {"zero": 3}, {"micro_batch": 2})
    verdict = verdict_on(the_norm_forgets_other_ranks, case, monkeypatch)
    assert verdict.axis == "dp_shard"
    assert verdict.worst_gradient_error < 1e-12
    assert "different: the gradient norm" in verdict.sentence()
    assert repr(verdict.reference_grad_norm) in verdict.sentence()


@pytest.mark.parametrize(
    ("plant", "axis"),
    [
        (replicas_get_the_same_data, "dp_replicate"),
        # Only with both axes on are there replicas of shards to reduce.
        (replicas_are_not_reduced, "dp_replicate with dp_shard"),
    ],
)
def test_of_two_axes_the_guilty_one_is_named(plant: Any, axis: str, monkeypatch: Any) -> None:
    verdict = verdict_on(plant, Case("bug", 4, HSDP, {"micro_batch": 1}), monkeypatch)
    assert verdict.axis == axis


MOE = SPEC | {"experts": 4, "experts_per_token": 2}
WIDE = {"global_batch": 16, "micro_batch": 1}


@pytest.mark.parametrize(
    ("plant", "layout", "spec", "axis"),
    [
        (gradients_are_not_summed_over_cp, {"cp": 2, "tp": 2}, SPEC, "cp"),
        (losses_are_not_divided_by_micro_batches, {"pp": 2, "tp": 2}, SPEC, "pp"),
        (tied_weights_are_untied, {"pp": 2, "dp_replicate": 2, "zero": 0}, TIED, "pp"),
        (a_bias_is_added_by_every_tp_rank, {"tp": 2, "cp": 2}, TIED, "tp"),
        (the_norm_counts_copies_twice, {"tp": 2, "pp": 2}, SPEC, "tp"),
        (every_rank_gets_the_same_data, {"dp_shard": 2, "tp": 2}, SPEC, "dp_shard"),
        (experts_are_averaged_over_ep, {"dp_shard": 4, "ep": 2}, MOE, "ep"),
    ],
)
def test_of_many_axes_the_guilty_one_is_named(
    plant: Any, layout: Any, spec: Any, axis: str, monkeypatch: Any
) -> None:
    layout = {"dp_replicate": 1, "dp_shard": 1} | layout
    verdict = verdict_on(plant, Case("bug", 4, layout, WIDE, spec=spec), monkeypatch)
    assert verdict.axis == axis
    assert f"axis: {axis}" in verdict.sentence()


def test_a_bug_that_loses_gradients_is_an_error(monkeypatch: Any) -> None:
    with pytest.raises(RanksFailed, match=r"embedding\.tokens\.weight got no gradient"):
        verdict_on(replicas_never_come_together, Case("bug", 4, HSDP), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "axis"),
    [
        (gradients_are_averaged_over_shards, "dp_shard"),
        (every_rank_gets_the_same_data, "more than one of dp_replicate, dp_shard"),
    ],
)
def test_of_two_axes_the_guilty_one_is_named_again(plant: Any, axis: str, monkeypatch: Any) -> None:
    layout = HSDP | {"reduce": "step"}
    verdict = verdict_on(plant, Case("bug", 4, layout, {"micro_batch": 1}), monkeypatch)
    assert verdict.axis == axis


# --- how gradients are compared ----------------------------------------------------------------------------


def test_the_error_is_relative_to_each_parameter_but_not_to_vanishing_ones() -> None:
    reference = {"large": torch.tensor([1.0, -4.0]), "vanishing": torch.tensor([1e-9, 0.0])}
    found = {"large": torch.tensor([1.0, -4.1]), "vanishing": torch.tensor([2e-9, 0.0])}
    error, name = gradient_error(found, reference)
    assert name == "large"
    assert error == pytest.approx(0.025)
    error, name = gradient_error({**reference, "vanishing": torch.tensor([5e-3, 0.0])}, reference)
    assert name == "vanishing"
    assert error == pytest.approx(1.25)


def test_a_missing_or_undefined_gradient_is_the_worst_of_all() -> None:
    reference = {"a": torch.ones(2), "b": torch.ones(2)}
    assert gradient_error({"a": torch.ones(2)}, reference) == (math.inf, "b")
    error, name = gradient_error({"a": torch.ones(2) * 9, "b": torch.tensor([1.0, math.nan])}, reference)
    assert name == "b"
    assert not error <= 1.0


def test_a_verdict_without_a_number_is_still_json() -> None:
    nan = math.nan
    verdict = Verdict(False, nan, "head.norm.weight", 3, nan, 4.0, math.inf, 2.0, "dp_shard", "dp_shard2")
    told = json.loads(json.dumps(verdict.as_json(), allow_nan=False))
    assert (told["worst_gradient_error"], told["loss"], told["reference_loss"]) == (None, None, 4.0)
    assert "head.norm.weight is off by nan" in verdict.sentence()


# --- the shrunken copy -------------------------------------------------------------------------------------

KEPT = (
    *("activation", "norm", "norm_bias", "norm_eps", "positions", "rope_theta", "rope_scaling", "qkv_bias"),
    *("attention_out_bias", "mlp_bias", "tied", "qk_norm", "parallel_block", "experts", "experts_per_token"),
    *("norm_unit_offset", "norm_after", "scale_embedding", "attention_scale_dim", "attention_softcap"),
    "final_softcap",
)


def assert_same_make(small: ModelSpec, spec: ModelSpec, seq_len: int) -> None:
    assert ModelSpec.model_validate(small.model_dump()) == small
    assert {key: getattr(small, key) for key in KEPT} == {key: getattr(spec, key) for key in KEPT}
    assert (small.kv_heads < small.heads) == (spec.kv_heads < spec.heads)
    assert (small.kv_heads == 1) == (spec.kv_heads == 1)
    assert (small.heads * small.head_dim == small.dim) == (spec.heads * spec.head_dim == spec.dim)
    assert small.vocab_size % 64 == spec.vocab_size % 64 or small.vocab_size == spec.vocab_size
    assert (small.sliding_window is None) == (spec.sliding_window is None)
    assert (small.full_attention_every is None) == (spec.full_attention_every is None)
    assert small.max_seq_len >= seq_len
    for size in ("vocab_size", "layers", "heads", "kv_heads", "head_dim", "ffn"):
        assert 1 <= getattr(small, size) <= getattr(spec, size)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_shrinks_to_a_valid_model_of_the_same_make(name: str) -> None:
    small = shrink_spec(PRESETS[name], 32)
    assert_same_make(small, PRESETS[name], 32)
    if small.experts is None:
        assert parameter_count(small) < 1_000_000


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    kv_heads = draw(st.integers(1, 9))
    heads = kv_heads * draw(st.integers(1, 9))
    head_dim = 2 * draw(st.integers(1, 20))
    return ModelSpec(
        vocab_size=draw(st.integers(1, 1000)),
        dim=draw(st.sampled_from([heads * head_dim, 24])),
        layers=draw(st.integers(1, 9)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=draw(st.integers(1, 999)),
        max_seq_len=64,
        tied=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        sliding_window=draw(st.none() | st.integers(1, 64)),
    )


@given(specs(), st.integers(1, 32))
@settings(deadline=None)
def test_any_model_shrinks_to_a_valid_one_of_the_same_make(spec: ModelSpec, seq_len: int) -> None:
    assert_same_make(shrink_spec(spec, seq_len), spec, seq_len)


def test_the_layout_accumulation_and_recompute_stay() -> None:
    layout = {"zero": 2, "dp_replicate": 2, "dp_shard": 2, "reduce": "step"}
    training = {"micro_batch": 1, "recompute": "sqrt", "global_batch": 64, "precision": "bf16", "seq_len": 64}
    job = Case("kept", 4, layout, training, spec=SPEC).job()
    small = shrink(job)
    assert Layout.of(small) == Layout.of(job)
    assert (small.layout.reduce, small.training.recompute) == ("step", "sqrt")
    assert (small.training.precision, small.training.seq_len) == ("fp64", 32)
    assert (small.training.micro_batch, small.training.global_batch) == (1, 8)  # two micro-batches a rank


# --- the command -------------------------------------------------------------------------------------------


def test_the_command_answers_in_json() -> None:
    command = [sys.executable, "-m", "fivefold", "verify", "--preset", "tiny", "--nproc", "2", "--json"]
    done = subprocess.run([*command, "--model.layers", "2"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"] is True
    assert answer["axis"] is None
    assert 0 < answer["worst_gradient_error"] < 1e-12
    assert answer["worst_parameter"].startswith(("blocks.", "embedding.", "head."))
    assert answer["parameters"] == 1 + 2 * 9 + 2
    assert answer["loss"] == pytest.approx(answer["reference_loss"], rel=1e-12)


def test_what_rounds_gradients_by_design_is_left_out_and_said() -> None:
    job = Case("int8", 2, {"zero": 0}, communication={"compress": "int8"}).job()
    verdict = verify(job, 2)
    assert verdict.ok
    assert "without communication.compress = 'int8'" in verdict.sentence()
