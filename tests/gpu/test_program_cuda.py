"""The plan is the program, on a GPU's kernels too: see tests/axes/test_program.py."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from fivefold.axes.layout import Layout
from fivefold.replay.account import account, replayed
from tests.replay.test_program import CASES
from tests.traced import Traced, traced_here

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = (
    "bf16 llama: one process, rank 0",
    "bf16 llama: recompute=full, rank 0",
    "bf16 llama: recompute=selective, rank 0",
    "bf16 gpt2: one process, rank 0",
    "bf16 llama: dp_shard=2 zero=3, rank 0",
    "bf16 gpt2: dp_shard=2 zero=1, rank 0",
    "bf16 llama: tp=2, rank 0",
    "bf16 llama: cp=2 cp_kind=ulysses, rank 0",
    "bf16 llama: cp=2 cp_kind=ring, rank 0",
    "bf16 llama: pp=2 schedule=1f1b micro_batch=1, rank 0",
    "bf16 llama: pp=2 schedule=gpipe micro_batch=1, rank 1",
    "bf16 experts: dp_shard=2 ep=2 zero=1, rank 0",
)
SEEDS = 16 * 8
"""Bytes of the random state that attention keeps, in every layer; and scalars."""


@pytest.mark.parametrize("name", NAMES)
def test_the_traced_step_is_the_played_one(name: str) -> None:
    case, rank = CASES[name]
    job = case.job()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found: Traced = pool.apply(traced_here, (job, rank, "cuda"))
    place = Layout.of(job).place(rank)
    played = replayed(job, place, "cuda")
    assert played.rest == found.rest
    assert played.peak == pytest.approx(found.peak, rel=0.01)
    if job.layout.pp == 1 and job.spec.experts is None:
        assert played.saved == pytest.approx(found.saved, abs=SEEDS)
    if job.layout.cp_kind != "ring" and job.spec.experts is None:
        assert int(account(job, place).flops) == found.flops
