"""The plan is the program, on a GPU's kernels too: see tests/replay/test_program.py."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest
import torch

from fivefold.axes.layout import Layout
from fivefold.ledger.setup import Setup
from fivefold.planner.memory.our_tensors import rank_tensors
from fivefold.replay.account import account
from fivefold.replay.operations import INTEGER
from tests.replay.test_program import CASES, NEAR, saved
from tests.traced import Traced, traced_here

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = (
    "llama: one process, rank 0",
    "llama: recompute=full, rank 0",
    "qk: recompute=selective, rank 0",
    "gpt2: one process, rank 0",
    "llama: dp_shard=2 zero=3, rank 0",
    "gpt2: dp_shard=2 zero=1, rank 0",
    "gpt2: tp=2 recompute=full, rank 0",
    "gpt2: cp=2 cp_kind=ulysses, rank 0",
    "gpt2: cp=2 cp_kind=ring, rank 0",
    "gpt2: pp=2 schedule=1f1b micro_batch=1, rank 0",
    "llama: pp=2 schedule=gpipe micro_batch=1 global_batch=3, rank 1",
    "experts: dp_shard=2 ep=2 zero=1, rank 0",
)
SEEDS = 16 * 8
"""Bytes of the random state that attention keeps, in every layer; and scalars."""


@pytest.mark.parametrize("name", NAMES)
def test_the_traced_step_is_the_planned_one(name: str) -> None:
    case, rank = CASES[name]
    training = case.training | {"precision": "bf16"}  # attention in fp32 has other kernels
    job = replace(case, training=training).job()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found: Traced = pool.apply(traced_here, (job, rank, "cuda"))
    place, setup = Layout.of(job).place(rank), Setup.of(job)
    assert rank_tensors(setup, place.pp, "cuda").allocated == pytest.approx(found.peak, rel=NEAR)
    if job.layout.pp == job.layout.cp == job.layout.tp == 1 and job.spec.experts is None:
        given = 2 * INTEGER * setup.tokens
        assert saved(job, "cuda") - given == pytest.approx(found.saved, abs=SEEDS)
    if job.layout.cp_kind != "ring" and job.spec.experts is None:
        assert int(account(job, place).flops) == found.flops
