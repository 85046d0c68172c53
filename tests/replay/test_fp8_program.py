"""What layers in 8 bits keep and compute: a replay against a rank that runs, and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.replay.account import account
from fivefold.replay.activations import block_activations
from fivefold.replay.operations import INTEGER
from tests.axes.test_fp8_split import WIDE, case
from tests.replay.test_program import saved
from tests.traced import traces

LLAMA = Setup(PRESETS["llama3-8b"], 8192, 128, PRECISIONS["bf16"])
TOKENS = 8192
CASES = {
    f"{scales}, tp {tp}, {recompute}": case(
        "replayed", tp, {"tp": tp}, {"fp8": scales, "fp8_head": True, "recompute": recompute}, WIDE
    )
    for scales in ("tensorwise", "rowwise")
    for tp in (1, 2)
    for recompute in ("none", "full", "selective")
} | {
    "tensorwise, zero 3": case(
        "replayed", 2, {"dp_shard": 2, "zero": 3}, {"fp8": "tensorwise", "fp8_head": True}, WIDE
    )
}
SEEN = 512
"""Bytes, at most, of the largest magnitudes that layers remember: single numbers."""


@pytest.mark.slow
def test_a_rank_keeps_and_computes_what_is_replayed() -> None:
    with traces({name: (one.job(), 0) for name, one in CASES.items()}) as trace:
        for name, one in CASES.items():
            job, found = one.job(), trace(name)
            given = INTEGER * int(Setup.of(job).tokens) * (1 if job.layout.tp > 1 else 2)
            assert saved(job, "cpu") - given == pytest.approx(found.saved, abs=SEEN), name
            assert int(account(job).flops) == found.flops, name


def test_a_llama_block_by_hand() -> None:
    """Every input is kept in a byte a number; what only some layers take so is kept twice."""
    small = replace(LLAMA, fp8="tensorwise", fp8_small=True)
    usual, found = block_activations(LLAMA).saved, block_activations(small).saved
    # The normed stream twice, what attention made, and what comes into the last projection.
    inputs = 3 * LLAMA.spec.dim + LLAMA.spec.ffn
    # Attention's backward needs its result as well, in the order that the kernel gave it: no less there.
    assert usual - found == TOKENS * inputs - 4 * 4
    some = block_activations(replace(LLAMA, fp8="tensorwise")).saved
    assert some - found == 2 * TOKENS * LLAMA.spec.dim  # keys and values are too small, and read it in bf16


def test_rowwise_keeps_a_scale_for_each_column() -> None:
    tensor, row = (
        block_activations(replace(LLAMA, fp8=scales, fp8_small=True)).saved
        for scales in ("tensorwise", "rowwise")
    )
    assert row - tensor == 4 * (3 * LLAMA.spec.dim + LLAMA.spec.ffn - 4)
