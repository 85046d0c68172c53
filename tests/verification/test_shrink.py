"""The shrunken copy: small, legal, and as even or uneven as the job."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes.checks import check
from fivefold.axes.layout import Layout
from fivefold.config import Job, resolve
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameter_count
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.problems import BadInput
from fivefold.verification.blame import degrees_used, on_one_process, with_degrees
from fivefold.verification.shrink import ROWS, shrink, shrunk, smallest
from tests.cases import SPEC, Case
from tests.verification.draw import drawn

KEPT = (
    *("activation", "norm", "norm_bias", "norm_eps", "positions", "rope_theta", "rope_scaling", "qkv_bias"),
    *("attention_out_bias", "mlp_bias", "tied", "qk_norm", "parallel_block", "experts", "experts_per_token"),
    *("norm_unit_offset", "norm_after", "scale_embedding", "attention_scale_dim", "attention_softcap"),
    "final_softcap",
)
SIZES = ("vocab_size", "layers", "heads", "kv_heads", "head_dim", "ffn", "max_seq_len")


@given(st.integers(1, 10**6), st.integers(1, 200), st.integers(1, 64))
def test_a_smaller_size_is_divided_by_whatever_divided_it(size: int, at_least: int, modulus: int) -> None:
    small = smallest(size, at_least, modulus)
    assert min(size, at_least) <= small <= size
    assert small == size or small < at_least + modulus
    for degree in range(1, modulus + 1):
        if modulus % degree == 0:
            assert (small % degree == 0) == (size % degree == 0)


def assert_faithful(job: Job) -> None:
    """The copy is of the same make, legal, and splits as the job does along every axis."""
    small = shrink(job)
    spec, copy = job.spec, small.spec
    assert ModelSpec.model_validate(copy.model_dump()) == copy
    assert check(small) == []
    assert resolve(small, Layout.of(small).ranks) == small
    assert Layout.of(small) == Layout.of(job)
    assert {key: getattr(copy, key) for key in KEPT} == {key: getattr(spec, key) for key in KEPT}
    assert all(1 <= getattr(copy, size) <= getattr(spec, size) for size in SIZES)
    assert (copy.kv_heads < copy.heads) == (spec.kv_heads < spec.heads)
    assert (copy.kv_heads == 1) == (spec.kv_heads == 1)
    assert (copy.heads * copy.head_dim == copy.dim) == (spec.heads * spec.head_dim == spec.dim)
    for size, degree in divisions(job):
        old, new = (getattr(each.spec, size, None) or each.training.seq_len for each in (job, small))
        assert (old % degree == 0) == (new % degree == 0), f"{size} {old} -> {new}, by {degree}"
    if spec.sliding_window is not None and copy.sliding_window is not None:
        whole = spec.sliding_window >= job.training.seq_len
        assert (copy.sliding_window >= small.training.seq_len) == whole
    several = job.training.global_batch > (job.training.micro_batch or 1) * Layout.of(job).data_ranks
    assert small.training.micro_batch == ROWS
    assert (small.training.global_batch > ROWS * Layout.of(job).data_ranks) == several
    assert parameter_count(copy) < 10_000_000


@pytest.mark.parametrize(
    "settings",
    [
        {"compress": "int8", "compress_on": "replicate", "error_feedback": False},
        {"local_steps": 4, "outer_delay": 2, "compress": "bf16"},
    ],
)
def test_what_changes_the_numbers_is_left_out(settings: dict[str, Any]) -> None:
    layout = {"dp_replicate": 2, "dp_shard": 2, "zero": 3}
    small = shrink(Case("", 4, layout, {"steps": 8}, communication=settings).job())
    assert check(small) == []
    assert check(on_one_process(small)) == []
    assert small.communication == Job().communication


def test_moments_are_rounded_in_the_jobs_precision_alone() -> None:
    job = Case("", 2, {"zero": 3}, {"precision": "fp32"}, {"states": "bf16"}).job()
    assert shrink(job).optimizer.states == "fp32"
    assert on_one_process(job).optimizer.states == "fp32"


def divisions(job: Job) -> list[tuple[str, int]]:
    """What the layout divides by what, as the runtime does it: sizes and degrees."""
    layout = Layout.of(job)
    ulysses = layout.cp if job.layout.cp_kind == "ulysses" else 1
    found = [("heads", layout.tp * ulysses), ("kv_heads", layout.tp), ("kv_heads", layout.tp * ulysses)]
    found += [("ffn", layout.tp), ("ffn", layout.tp * layout.shard_ranks), ("ffn", 8 * layout.tp)]
    found += [("vocab_size", layout.tp), ("vocab_size", layout.tp * layout.shard_ranks)]
    found += [("dim", layout.shard_ranks), ("head_dim", 8), ("layers", layout.pp)]
    return [*found, ("seq_len", 2 * layout.cp), ("seq_len", layout.cp * layout.tp)]


@pytest.mark.parametrize("seed", [0, 1])
def test_drawn_jobs_shrink_to_legal_ones_that_split_alike(seed: int) -> None:
    for number in range(200):
        job, _ = drawn(number, seed)
        assert_faithful(job)


@pytest.mark.parametrize(
    ("preset", "ranks", "layout", "seq_len"),
    [
        ("llama2-7b", 8, {"cp": 8, "cp_kind": "ulysses"}, 4096),
        ("gpt2", 3, {"tp": 3}, 768),
        ("gpt2", 3, {"cp": 3}, 768),
        ("gpt2", 6, {"tp": 6}, 768),
        ("gpt2-xl", 5, {"tp": 5}, 1000),
        ("gemma2-9b", 2, {"cp": 2}, 4096),  # as long as the window, which is none then
        ("llama3-8b", 4, {"tp": 4, "sequence_parallel": False}, 1023),
    ],
)
def test_jobs_that_once_had_no_copy(preset: str, ranks: int, layout: dict[str, Any], seq_len: int) -> None:
    if preset == "gemma2-9b":
        layout = layout | {"cp_kind": "ulysses"}
    training = {"seq_len": seq_len, "global_batch": 8}
    given = {"model": {"preset": preset}, "layout": layout, "training": training}
    assert_faithful(resolve(Job.model_validate(given), ranks))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_copy(name: str) -> None:
    assert_faithful(resolve(Job.model_validate({"model": {"preset": name}}), 1))


@given(st.data())
@settings(deadline=None)
def test_any_model_has_a_copy(data: st.DataObject) -> None:
    kv_heads, ratio = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    head_dim = 2 * data.draw(st.integers(1, 40))
    model = {
        "vocab_size": data.draw(st.integers(1, 1000)),
        "dim": data.draw(st.sampled_from([kv_heads * ratio * head_dim, 24, 1000])),
        "layers": data.draw(st.integers(1, 9)),
        "heads": kv_heads * ratio,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": data.draw(st.integers(1, 999)),
        "max_seq_len": 64,
        "sliding_window": data.draw(st.none() | st.integers(1, 64)),
    }
    layout = {key: data.draw(st.integers(1, 6)) for key in ("tp", "cp", "dp_shard")}
    layout["zero"] = data.draw(st.integers(1, 3))
    seq_len = data.draw(st.integers(1, 64))
    ranks = layout["tp"] * layout["cp"] * layout["dp_shard"]
    given = {"model": model, "layout": layout, "training": {"seq_len": seq_len, "global_batch": 60}}
    try:
        job = resolve(Job.model_validate(given), ranks)
    except BadInput:
        return
    if not check(job):
        assert_faithful(job)


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 12), (9, 8), (5, 28)])
def test_heads_that_do_not_fill_the_stream_do_not_come_to_fill_it(heads: int, head_dim: int) -> None:
    """The copy's stream is as narrow as the model's own, and two of its narrow heads are just as wide."""
    model = SPEC | {"heads": heads, "kv_heads": 1, "head_dim": head_dim, "dim": 24}
    assert_faithful(Case("", training={"seq_len": 1}, spec=model).job())


def test_what_does_not_become_small_is_refused_with_the_reason() -> None:
    """A prime number of heads that each rank has one of, and heads that stay as wide as they are."""
    heads = 1009
    model = {"heads": heads, "head_dim": 1026, "dim": heads * 1026, "ffn": heads * 4, "layers": 2}
    given = {
        "model": {**SPEC, "kv_heads": heads, **model},
        "layout": {"tp": heads},
        "training": {"seq_len": 1009},
    }
    given["model"]["max_seq_len"], given["model"]["vocab_size"] = 1009, 2 * heads**2
    job = resolve(Job.model_validate(given), heads)
    with pytest.raises(BadInput, match=r"model\.\w+: [\d]+ becomes [\d]+ in the smallest copy") as refused:
        shrink(job)
    assert "At most 100,000,000" in refused.value.problems[0].hint


@pytest.mark.parametrize(("chunk", "chunks"), [(0, 1), (30, 3), (10_000, 1)])
def test_a_loss_in_chunks_has_several_and_a_shorter_one(chunk: int, chunks: int) -> None:
    training = {"micro_batch": 2, "global_batch": 4, "seq_len": 64, "loss_chunk": chunk}
    job = Case("", 2, {"cp": 2, "zero": 0}, training, spec=SPEC | {"max_seq_len": 64}).job()
    small = Setup.of(shrink(job))
    sizes = [size for size, count in small.loss_chunks for _ in range(int(count))]
    assert sum(sizes) == small.tokens
    assert (len(sizes), bool(small.loss_chunk)) == (chunks, chunk > 0)
    assert chunks == 1 or sizes[-1] < sizes[0]
    assert on_one_process(shrink(job)).training.loss_chunk == 0


def test_recomputation_optimizer_and_clipping_stay() -> None:
    layout = {"zero": 2, "dp_replicate": 2, "dp_shard": 2, "reduce": "step"}
    training = {"micro_batch": 1, "recompute": "sqrt", "global_batch": 64, "precision": "bf16", "seq_len": 64}
    job = Case("kept", 4, layout, training, {"name": "sgd", "ema": 0.9}, spec=SPEC | {"layers": 9}).job()
    small = shrink(job)
    assert (small.layout.reduce, small.training.recompute) == ("step", "sqrt")
    assert (small.optimizer.name, small.optimizer.ema) == ("sgd", 0.9)
    assert (small.training.precision, small.training.seq_len) == ("fp64", 32)
    assert (small.training.micro_batch, small.training.global_batch) == (2, 16)  # two micro-batches a rank
    assert 0 < small.training.clip < 1
    assert shrink(Case("unclipped", 1, training={"clip": 0.0}).job()).training.clip == 0
    told = shrunk(job, small)
    assert told["model.layers"] == (9, 4)
    assert told["training.seq_len"] == (64, 32)
    assert "training.micro_batch" not in told, "it grew"


def test_axes_of_drawn_jobs_can_be_turned_off() -> None:
    for number in range(100):
        small = shrink(drawn(number, 0)[0])
        used = degrees_used(Layout.of(small))
        for axis in used:
            without = with_degrees(small, {**used, axis: 1})
            assert getattr(without.layout, axis) == 1
            assert without.training.global_batch == small.training.global_batch
            assert check(without) == []
        alone = on_one_process(small)
        assert alone.training.micro_batch == alone.training.global_batch == small.training.global_batch
        assert Layout.of(alone) == Layout()
