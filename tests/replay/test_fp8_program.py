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
from tests.axes.test_fp8_split import EXPERTS, WIDE, case
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
CASES |= {
    f"experts, {scales}, {words}": case(
        "replayed",
        layout.get("tp", layout.get("ep", 1)),
        layout,
        {"fp8": scales, "routing": "balanced", "recompute": mode},
        EXPERTS,
    )
    for scales in ("tensorwise", "rowwise")
    for words, layout, mode in (
        ("one process", {}, "none"),
        ("tp 2", {"tp": 2}, "none"),
        ("tp 2, selective", {"tp": 2}, "selective"),
        ("ep 2", {"dp_shard": 2, "ep": 2, "zero": 1}, "none"),
        ("ep 2, full", {"dp_shard": 2, "ep": 2, "zero": 1}, "full"),
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


def test_a_block_of_experts_by_hand() -> None:
    """What each of two experts a token reads, and what comes into its last projection, in a byte a number."""
    mixtral = replace(LLAMA, spec=PRESETS["mixtral-8x7b"])
    usual = block_activations(mixtral).saved
    spec, kept = mixtral.spec, {}
    for scales in ("tensorwise", "rowwise"):
        found = replace(mixtral, fp8=scales, fp8_small=True)
        kept[scales] = block_activations(found).saved
    # The stream that attention reads, what it made; the router's stream is kept as before.
    less = TOKENS * (2 * spec.dim + 2 * (spec.dim + spec.ffn))
    assert usual - kept["tensorwise"] == less - 4 * 4
    columns = 2 * spec.dim + 8 * (spec.dim + spec.ffn)
    assert kept["rowwise"] - kept["tensorwise"] == 4 * (columns - 4)


def test_rowwise_keeps_a_scale_for_each_column() -> None:
    tensor, row = (
        block_activations(replace(LLAMA, fp8=scales, fp8_small=True)).saved
        for scales in ("tensorwise", "rowwise")
    )
    assert row - tensor == 4 * (3 * LLAMA.spec.dim + LLAMA.spec.ffn - 4)
