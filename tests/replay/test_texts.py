"""What the texts say of memory and traffic, from the ledger that plans and runs: docs/mission.md.

The texts keep gradients in 16 bits; fivefold sums them in 32. Where a figure depends on it, `in_16_bits`
makes the ledger keep them as the texts do: the same code, one other dtype.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest

from fivefold.axes.checks import check
from fivefold.axes.layout import Layout, Place
from fivefold.axes.pieces import pieces, size_of
from fivefold.config import Job, resolve
from fivefold.config.schema import Communication
from fivefold.hardware.cluster import find_cluster
from fivefold.ledger.ledger import Ledger, Role
from fivefold.ledger.precision import PRECISIONS, Precision
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameter_count, parameters
from fivefold.models.presets import PRESETS
from fivefold.planner.time.collectives import strides
from fivefold.replay.account import account

ROLES: tuple[Role, ...] = ("weights", "gradients", "states")
GIGA = 1e9


def job_of(preset: str, ranks: int, layout: dict[str, Any], batch: int = 0, **settings: Any) -> Job:
    """A job of one sequence a micro-batch; `batch` sequences in all, by default one a rank."""
    training = {"seq_len": 1024, "global_batch": batch or ranks, "micro_batch": 1, "precision": "bf16"}
    tree = {
        "model": {"preset": preset},
        "layout": layout,
        "training": training | settings.pop("training", {}),
        "data": {"source": "random"},
        **settings,
    }
    job = resolve(Job.model_validate(tree), ranks, device="cuda")
    assert check(job) == []
    return job


def peak_bytes(ledger: Ledger) -> float:
    return sum(float(ledger.peak(role)) for role in ROLES)


def rest_bytes(ledger: Ledger) -> float:
    return sum(float(ledger.rest(role)) for role in ROLES)


def payloads(ledger: Ledger) -> Counter[tuple[str, str]]:
    """Payload bytes by operation and phase."""
    found: Counter[tuple[str, str]] = Counter()
    for line in ledger.messages:
        found[line.operation, line.phase] += int(line.payload * line.count)
    return found


def shard_elements(job: Job) -> int:
    """Elements of FSDP's shards that the first rank keeps, padding included."""
    return int(size_of(pieces(job, Place()), Layout.of(job)).shard)


def near(value: float | list[float], relative: float = 0.0, absolute: float = 0.0) -> Any:
    return pytest.approx(value, rel=relative or None, abs=absolute or None)


@pytest.fixture
def in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRECISIONS, "bf16", Precision("bf16", "bfloat16", "float32", "bfloat16"))


@pytest.mark.usefixtures("in_16_bits")
@pytest.mark.parametrize("ranks", [4, 64])
@pytest.mark.parametrize(
    ("zero", "share"),
    [
        (0, lambda n: 2 + 2 + 12),
        (1, lambda n: 2 + 2 + 12 / n),
        (2, lambda n: 2 + (2 + 12) / n),
        (3, lambda n: (2 + 12) / n),  # the texts' (2 + 2 + 12) / N: our shard of the weights is the master's
    ],
)
def test_zero_divides_states_then_gradients_then_weights(ranks, zero, share):
    """Two micro-batches, so that gradients are kept. What one layer needs while it is reduced is on top."""
    layout = {"zero": zero, "dp_shard" if zero else "dp_replicate": ranks}
    job = job_of("llama2-7b", ranks, layout, batch=2 * ranks)
    count = parameter_count(job.spec)
    layer = sum(parameter.count for parameter in parameters(job.spec) if parameter.part == "blocks.0")
    held = peak_bytes(account(job, Place()))
    assert held >= 0.999 * share(ranks) * count
    assert held <= share(ranks) * count + 6 * layer + 1e6


@pytest.mark.usefixtures("in_16_bits")
@pytest.mark.parametrize(("zero", "saved"), [(1, 4), (2, 8)])
def test_zero_saves_4x_then_8x(zero, saved):
    """7B over 1,024 devices. What is missing to 4 and 8 is the one layer that is being reduced."""
    whole = peak_bytes(account(job_of("llama2-7b", 1, {"zero": 0}), Place()))
    job = job_of("llama2-7b", 1024, {"zero": zero, "dp_shard": 1024}, batch=2048)
    assert whole / peak_bytes(account(job, Place())) == near(saved, 0.05)


def test_zero_3_saves_as_many_times_as_there_are_devices():
    whole = 16 * parameter_count(PRESETS["llama2-7b"])
    for ranks in (2, 8, 64):
        ledger = account(job_of("llama2-7b", ranks, {"zero": 3, "dp_shard": ranks}), Place())
        assert whole / rest_bytes(ledger) == near(ranks, 1e-4)


def test_zero_pads_rows_so_that_the_limit_is_not_for_small_models():
    """FSDP deals out rows: 1,600 of them over 4,096 devices are as many shards of which most hold nothing."""
    job = job_of("gpt2-xl", 4096, {"zero": 3, "dp_shard": 4096})
    assert shard_elements(job) * 4096 / parameter_count(job.spec) == near(2.08, 0.01)


@pytest.mark.usefixtures("in_16_bits")
def test_one_gathered_copy_beside_the_shards():
    """The texts' 16N/P + 2N is 14N/P + 2N here, at stage 2: sharded weights are the masters themselves."""
    job = job_of("llama2-7b", 64, {"zero": 2, "dp_shard": 64})
    count, ledger = parameter_count(job.spec), account(job, Place())
    assert ledger.peak("weights") == near(2 * count, 0.001)
    assert ledger.rest("gradients") + ledger.rest("states") == near(14 * count / 64, 0.001)


def test_70b_on_64_devices_is_a_billion_each():
    assert shard_elements(job_of("llama2-70b", 64, {"zero": 3, "dp_shard": 64})) == near(1.08e9, 0.01)


@pytest.mark.usefixtures("in_16_bits")
def test_fsdp_sends_three_times_the_weights_less_what_the_last_layer_keeps():
    job = job_of("llama2-7b", 64, {"zero": 3, "dp_shard": 64})
    weights = 2 * parameter_count(job.spec)
    sent = payloads(account(job, Place()))
    assert sent["all_gather", "forward"] == near(weights, 0.001)
    assert sent["reduce_scatter", "backward"] == near(weights, 0.001)
    # Backward starts where forward ended: the head's weights, and the embedding's, are not gathered again.
    kept = 2 * 2 * job.spec.vocab_size * job.spec.dim
    assert sent["all_gather", "backward"] == near(weights - kept, 0.001)


@pytest.mark.usefixtures("in_16_bits")
def test_data_parallelism_sends_twice_the_gradients():
    job = job_of("llama2-7b", 64, {"zero": 0, "dp_replicate": 64})
    gradients = 2 * parameter_count(job.spec)
    ledger = account(job, Place())
    assert payloads(ledger)["all_reduce", "backward"] == near(gradients, 0.001)
    assert ledger.wire_bytes == near(2 * 63 / 64 * gradients, 0.001)


@pytest.mark.usefixtures("in_16_bits")
def test_hsdp_shards_inside_a_group_and_reduces_a_share_across_groups():
    """8 groups of 8: three times the weights inside, an eighth of the gradients between them."""
    job = job_of("llama2-7b", 64, {"zero": 3, "dp_shard": 8, "dp_replicate": 8})
    weights = 2 * parameter_count(job.spec)
    sent: Counter[str] = Counter()
    for line in account(job, Place()).messages:
        sent[line.group] += int(line.payload * line.count)
    assert sent["dp_shard"] == near(3 * weights, 0.03)
    assert sent["dp_replicate"] == near(weights / 8, 0.001)
    assert strides(Setup.of(job))["dp_shard"] == 1  # the group's ranks are neighbours: on the fast links


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism_costs_two_all_reduces_a_layer_each_way(sequence_parallel):
    layout = {"tp": 8, "sequence_parallel": sequence_parallel}
    ledger = account(job_of("llama2-7b", 8, layout, batch=1), Place())
    streams: Counter[tuple[str, str]] = Counter()
    for line in ledger.messages:
        if line.payload == 1024 * 4096 * 2:  # the embedding and the head have one more each
            streams[line.operation, line.phase] += int(line.count)
    each = {key: count // 32 for key, count in streams.items()}
    if sequence_parallel:
        pairs = [
            (what, phase) for what in ("all_gather", "reduce_scatter") for phase in ("forward", "backward")
        ]
        assert each == dict.fromkeys(pairs, 2)
    else:
        assert each == {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}


def test_llama_3_s_long_sequence_is_8192_tokens_a_rank():
    layout = {"tp": 8, "cp": 16, "pp": 16, "dp_shard": 8, "zero": 1}
    job = job_of("llama3-405b", 16_384, layout, batch=128, training={"seq_len": 131_072})
    assert Setup.of(job).tokens == 131_072 // 16 == 8192


@pytest.mark.parametrize(
    ("preset", "degrees", "ranks", "batch"),
    [
        ("llama2-7b", {"tp": 8, "pp": 4, "dp_replicate": 8}, 256, 64),
        ("gpt3-175b", {"tp": 8, "pp": 8, "dp_replicate": 64}, 4096, 1536),
        ("mt-nlg-530b", {"tp": 8, "pp": 35, "dp_replicate": 16}, 4480, 1920),
        ("llama3-405b", {"tp": 8, "cp": 16, "pp": 16, "dp_shard": 8, "zero": 1}, 16_384, 128),
    ],
)
def test_layouts_of_the_texts_multiply_to_their_devices(preset, degrees, ranks, batch):
    """Each resolves, passes every axis' check, and has tensor parallelism inside a server of 8."""
    job = job_of(preset, ranks, degrees, batch=batch)
    assert Layout.of(job).ranks == ranks
    apart = strides(Setup.of(job))
    assert apart["tp"] == 1
    assert apart["tp"] * job.layout.tp <= find_cluster("dgx-h100").server
    assert apart["tp"] < apart["cp"] <= apart["dp_shard"] <= apart["dp_replicate"] <= apart["pp"]


@pytest.mark.usefixtures("in_16_bits")
def test_16_bytes_a_parameter_make_112_gb_of_7_billion():
    job = job_of("llama2-7b", 1, {"zero": 0})
    count, ledger = parameter_count(job.spec), account(job, Place())
    each = [ledger.rest(role) / count for role in ROLES]
    assert each == near([2, 2, 12], 1e-5)
    assert sum(each) * 7e9 == near(112 * GIGA, 1e-5)
    assert sum(each) * count == near(107.8 * GIGA, 1e-3)  # of the real model's 6.74 billion


def test_fivefold_takes_18_bytes_because_it_adds_gradients_up_in_32_bits():
    """Those of several micro-batches; of one they stay in 16."""
    for batch, bytes_each in ((2, 18), (1, 16)):
        job = job_of("llama2-7b", 1, {"zero": 0}, batch=batch)
        assert rest_bytes(account(job, Place())) / parameter_count(job.spec) == near(bytes_each, 1e-5)


def test_averaged_weights_are_one_more_copy():
    plain, averaged = (
        account(job_of("llama2-7b", 1, {"zero": 0}, optimizer=optimizer), Place()).rest("states")
        for optimizer in ({}, {"ema": 0.999})
    )
    assert averaged - plain == 4 * parameter_count(PRESETS["llama2-7b"])


def test_accumulation_sends_no_more_for_more_samples():
    one, four = (
        account(job_of("llama2-7b", 8, {"zero": 0, "dp_replicate": 8}, batch=batch), Place())
        for batch in (8, 32)
    )
    assert one.traffic() == four.traffic()


def test_int8_gradients_take_a_quarter_of_the_traffic():
    """Against float32; scales take the rest. `tests/axes/test_account.py` counts the same on live ranks."""

    def sent(compress: Literal["none", "int8"]) -> float:
        job = job_of("llama2-7b", 8, {"zero": 0, "dp_replicate": 8})
        job = job.model_copy(update={"communication": Communication(compress=compress)})
        messages = account(job, Place()).messages
        return sum(float(m.wire_bytes * m.count) for m in messages if m.phase == "backward")

    assert sent("none") / sent("int8") == near(3.88, 0.01)


def test_memory_under_three_axes_is_the_model_s_over_tp_times_pp():
    job = job_of("gpt3-175b", 4096, {"tp": 8, "pp": 8, "dp_replicate": 64}, batch=1536)
    per_rank = parameter_count(job.spec) / (8 * 8)
    for stage in (0, 3, 7):
        ledger = account(job, Place(pp=stage))
        assert rest_bytes(ledger) == near(18 * per_rank, 0.05)


def test_traffic_formulas():
    """TP one activation twice a layer; PP an activation over each of K-1 boundaries."""
    job = job_of("llama2-7b", 256, {"tp": 8, "pp": 4, "dp_replicate": 8}, batch=64)
    activation = 1024 * job.spec.dim * 2 // 8  # of which each tp rank sends its share
    sent = []
    for stage in range(4):
        sends = [line for line in account(job, Place(pp=stage)).messages if line.operation == "send"]
        assert {line.payload for line in sends} == {activation}
        sent.append(sum(int(line.count) for line in sends) / 8)  # a micro-batch
    assert sent == [1, 2, 2, 1]  # forward over K - 1 boundaries and back again
