"""Models, clusters and layouts drawn at random, as property tests of the planner take them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from fivefold.axes.checks import possible
from fivefold.hardware.cluster import Cluster, find_cluster
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.spec import ModelSpec
from fivefold.schedules import SCHEDULES

SLOWEST = 1.5e9
"""Bytes a second."""


def spec(layers: int, vocab_size: int, dim: int, experts: int | None = None, tied: bool = False) -> ModelSpec:
    fields: dict[str, Any] = {"experts": experts, "experts_per_token": 2 if experts else None, "tied": tied}
    return ModelSpec(
        vocab_size=vocab_size,
        dim=dim,
        layers=layers,
        heads=8,
        kv_heads=4,
        ffn=2 * dim,
        max_seq_len=4096,
        **fields,
    )


SPECS = (
    spec(1, 4096, 1024),
    spec(4, 32_000, 256, tied=True),
    spec(5, 256, 4096),
    spec(7, 256_000, 256),  # whose head takes longer than all layers
    spec(8, 32_000, 1024, experts=4),
    spec(12, 256, 1024, experts=8, tied=True),
    spec(13, 32_000, 4096),
)
"""Few, as their kernels are counted once each."""


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """A preset, with its own links or slower ones."""
    found = find_cluster(draw(st.sampled_from(["dgx-h100", "dgx-a100", "llama3", "tpu-v5p", "laptop"])))
    most = draw(st.sampled_from([SLOWEST, 10e9, 1e12]))
    levels = (replace(level, bandwidth=min(level.bandwidth, most)) for level in found.levels)
    return replace(found, levels=tuple(levels))


@st.composite
def layouts(draw: st.DrawFn, schedules: tuple[str, ...] = ("", *SCHEDULES)) -> Setup:
    """One that is possible, with 1 to 3 micro-batches for each rank of the pipeline, or any number."""
    schedule = draw(st.sampled_from(schedules))
    pp = draw(st.sampled_from([2, 3, 4])) if schedule else 1
    virtual = SCHEDULES[schedule].stages or draw(st.integers(1, 3)) if schedule else 1
    zero = draw(st.integers(0, 3))
    cp, tp, replicate = (draw(st.sampled_from([1, 1, 2])) for _ in range(3))
    shard = draw(st.sampled_from([2, 8])) if zero else 1
    micro_batch = draw(st.integers(1, 2))
    count = draw(st.sampled_from([pp, 2 * pp, 3 * pp]) | st.integers(1, 3 * pp))
    fewest = pp * virtual
    spec = draw(st.sampled_from([spec for spec in SPECS if spec.layers >= fewest]))
    setup = Setup(
        spec,
        seq_len=draw(st.sampled_from([128, 2048])),
        global_batch=count * micro_batch * shard * replicate,
        precision=PRECISIONS[draw(st.sampled_from(["bf16", "fp32"]))],
        micro_batch=micro_batch,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=draw(st.sampled_from([1, 2])) if spec.experts and shard > 1 else 1,
        virtual_stages=virtual,
        zero=zero,
        schedule=schedule,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        cp_kind=draw(st.sampled_from(["ring", "ulysses", "allgather"])) if cp > 1 else "",
        compile=draw(st.booleans()),
        loss_chunk=draw(st.sampled_from([0, 100, 1024])),
    )
    assume(possible(setup))
    return setup
