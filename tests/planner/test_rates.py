"""What depends on a device follows from its figures: no steps, and a faster device is never slower."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.backtest.stacks import stack_named
from fivefold.hardware.cluster import Cluster
from fivefold.hardware.devices import Device, find_device
from fivefold.hardware.presets import CLUSTERS
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.ledger.work import Work, block_work, matmul, memory
from fivefold.models.presets import PRESETS
from fivefold.planner.play.step_time import step_times
from fivefold.planner.time.constants import TIME_CONSTANTS, TYPICAL, Constants, constants_of
from fivefold.planner.time.parts import Costs
from fivefold.planner.time.rates import work_time
from fivefold.planner.time.stack import OURS

H100 = CLUSTERS["dgx-h100"]
FITTED = TIME_CONSTANTS.table("constants")
NAMES = (
    "fivefold",
    "fivefold-fp8",
    "nemo",
    "nemo-fp8",
    "nemo-fp4",
    "llm-foundry",
    "megatron-core",
    "zero-bubble",
)
"""Ours, and others: fitted on one device or on several, with kernels of every kind."""
ROUNDING = 1e-9


def drawn(teraflops: float, bandwidth: float = 3e12, memory_gib: float = 80.0) -> Cluster:
    """Devices that nobody has heard of, of a peak in 16 bits."""
    rates = {"bfloat16": teraflops, "float8": 2 * teraflops, "float32": teraflops / 15}
    peaks = {dtype: rate * 1e12 for dtype, rate in rates.items()}
    return replace(H100, device=Device("drawn", peaks, memory_gib, bandwidth, frozenset(), "drawn", sms=132))


def seconds(items: list[Work], cluster: Cluster, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    stack = stack_named(name)
    known = constants_of(cluster.device, stack)
    return np.array([work_time(item, cluster, "bfloat16", stack, known) for item in items])


@pytest.mark.parametrize("name", NAMES)
def test_no_operation_is_slower_where_the_peak_is_a_little_higher(name: str) -> None:
    spec = PRESETS["mixtral-8x7b"]
    work = block_work(Setup(spec, 4096, 64, PRECISIONS["bf16"], cp=2, cp_kind="ring"))
    kinds = {(item.kind, item.phase, "experts" in item.what): item for item in work if item.kind != "memory"}
    found = np.array([seconds(list(kinds.values()), drawn(peak), name) for peak in range(300, 2501)])
    ratios = found[1:] / found[:-1]
    assert np.all(ratios <= 1 + ROUNDING)
    assert np.all(ratios > 0.98)  # and no steps
    launches = {constants_of(drawn(peak).device, stack_named(name)).launch for peak in range(300, 2501, 100)}
    assert len(launches) == 1


sizes = st.integers(1, 20_000)
gains = st.floats(1.0, 3.0)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.tuples(st.floats(300, 2500), st.floats(5e11, 1e13), st.floats(16, 300)),
    st.tuples(gains, gains, gains),
    st.tuples(sizes, sizes, sizes, st.integers(1, 64)),
    st.integers(0, 4),
)
def test_a_device_that_is_better_in_all_is_slower_in_nothing(
    name: str,
    figures: tuple[float, float, float],
    gained: tuple[float, float, float],
    shape: tuple[int, int, int, int],
    doublings: int,
) -> None:
    rows, inner, columns, batch = shape
    cut = Setup(PRESETS["llama3-8b"], 64 * batch * 2**doublings, 64, PRECISIONS["bf16"], cp=2**doublings)
    attentions = [replace(cut, cp=1), replace(cut, cp_kind="ring")]
    work = [*matmul("", rows, inner, columns, 2, batch), *memory("", 1.0 * rows, 1.0 * columns)]
    work += [item for setup in attentions for item in block_work(setup) if item.kind == "attention"]
    better = drawn(*(figure * gain for figure, gain in zip(figures, gained, strict=True)))
    assert np.all(seconds(work, better, name) <= seconds(work, drawn(*figures), name) * (1 + ROUNDING))


def test_a_device_that_was_fitted_has_its_own_constants() -> None:
    for place, fitted in FITTED.items():
        device = find_device(place)
        assert device is not None
        for name, known in fitted.items():
            if name != TYPICAL:
                assert constants_of(device, stack_named(name)) == Constants(**known)


def test_ours_has_what_is_typical_of_a_peak() -> None:
    for place in ("A100 SXM 80GB", "H100 SXM", "B200", "GB200"):
        device = find_device(place)
        assert device is not None
        assert constants_of(device, OURS).matmul == pytest.approx(FITTED[place][TYPICAL]["matmul"])


# --- clusters ------------------------------------------------------------------------------------------


def better_in_all(one: Cluster, other: Cluster) -> bool:
    """Whether the other is built alike, and nowhere worse."""
    old, new = one.device, other.device
    return (
        [level.devices for level in one.levels] == [level.devices for level in other.levels]
        and new.peak_flops["bfloat16"] >= old.peak_flops["bfloat16"]
        and new.memory_gib >= old.memory_gib
        and new.memory_bandwidth >= old.memory_bandwidth
        and all(
            mine.bandwidth <= its.bandwidth
            and mine.latency >= its.latency
            and mine.oversubscription >= its.oversubscription
            and mine.reduces <= its.reduces
            for mine, its in zip(one.levels, other.levels, strict=True)
        )
    )


PAIRS = [
    (one.name, other.name) for one, other in permutations(CLUSTERS.values(), 2) if better_in_all(one, other)
]
LAYOUTS = {
    "tiny": {"dp_shard": 8, "seq_len": 512},
    "llama3-8b": {"dp_shard": 32, "zero": 2},
    "llama3-70b": {"dp_shard": 8, "zero": 1, "tp": 8, "pp": 2, "schedule": "1f1b"},
    "llama3-405b": {
        "dp_shard": 4,
        "zero": 1,
        "tp": 8,
        "pp": 8,
        "cp": 2,
        "cp_kind": "ring",
        "schedule": "1f1b",
    },
}
"""The models that the pages plan for."""


def test_a_better_cluster_is_never_slower() -> None:
    assert ("dgx-b200", "dgx-b300") in PAIRS
    assert len(PAIRS) >= 10
    for model, layout in LAYOUTS.items():
        setup = replace(Setup(PRESETS[model], 8192, 64, PRECISIONS["bf16"], compile=True), **layout)  # type: ignore[arg-type]
        names = sorted({name for pair in PAIRS for name in pair})
        found = step_times([Costs.of(setup, CLUSTERS[name]) for name in names])
        took = dict(zip(names, map(float, map(np.squeeze, found)), strict=True))
        assert {pair for pair in PAIRS if took[pair[1]] > 1.001 * took[pair[0]]} == set(), model


# --- context parallelism -------------------------------------------------------------------------------


def alone(cp: int, micro_batch: int, **changes: Any) -> float:
    """Seconds a token of a block on a rank of an H200 server, its messages free."""
    base = Setup(PRESETS["llama3-8b"], 8192, 64, PRECISIONS["bf16"], pp=2, schedule="1f1b", compile=True)
    setup = replace(base, cp=cp, micro_batch=micro_batch, **changes)
    block = Costs.of(setup, CLUSTERS["dgx-h200"]).block
    return float(block.total - sum(block.exposed.values())) / float(setup.tokens)


@pytest.mark.parametrize(
    ("cp", "micro_batch", "changes", "one", "several"),
    [
        (2, 1, {"cp_kind": "ring"}, 1.480, 1.891),
        (4, 1, {"cp_kind": "ring"}, 1.480, 2.228),
        (4, 4, {"cp_kind": "ring"}, 1.480, 1.959),
        (8, 1, {"cp_kind": "ring"}, 1.480, 4.648),
        (4, 1, {"cp_kind": "allgather"}, 1.480, 2.272),
        (4, 1, {"cp_kind": "ring", "recompute": "selective", "seq_len": 32_768}, 4.307, 6.233),
    ],
)
def test_attention_in_pieces_costs_less_than_it_did(
    cp: int, micro_batch: int, changes: dict[str, Any], one: float, several: float
) -> None:
    """Seconds of a step's compute by benchmarks/rank_alone.py on one H200, for as many tokens a rank, when
    pieces ran by flash-2 and were copied, cast and merged one by one. Not measured since.
    """
    whole = alone(1, 1, **(changes | {"cp_kind": ""}))
    assert 1 < alone(cp, micro_batch, **changes) / whole < several / one
