"""Activations of single parts: against formulas from papers, and one layout against many.

Their sum is held against live ranks in `test_program.py`.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.replay.activations import (
    Activations,
    block_activations,
    head_activations,
)

LLAMA = Setup(PRESETS["llama3-8b"], 8192, 128, PRECISIONS["bf16"])
GPT = Setup(PRESETS["gpt3-175b"], 2048, 1536, PRECISIONS["bf16"])
TOKENS = 8192


def test_a_llama_block_by_hand() -> None:
    """Bytes a token over dim = 4096: what each operation of the block keeps on a GPU."""
    spec, found = LLAMA.spec, block_activations(LLAMA)
    kv = spec.kv_heads * spec.head_dim
    streams = ("input", "normed", "query", "attended", "in order", "added", "normed again")
    elements = (
        len(streams) * spec.dim + 2 * kv + 4 * spec.ffn  # gate, its activation, up, their product
    )
    statistics = 4 * (2 + spec.heads)  # two norms' and one number for each head's softmax, in float32
    assert found.saved == TOKENS * (2 * elements + statistics)


def test_korthikanti_without_dropout_and_scores() -> None:
    """34 s b h of arXiv:2205.05198, less dropout masks (1 + 1), and with flash attention no softmax."""
    found = block_activations(GPT).saved
    stream = 2048 * GPT.spec.dim
    # Theirs: 11 for attention less 1 for its mask, 19 for the mlp less 1, 4 for the norms.
    assert found == pytest.approx(32 * stream, rel=0.01)


@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallelism_divides_by_tp_but_for_gathered_inputs(tp: int) -> None:
    """With sequence parallelism; what is gathered for the products is kept whole, and not sent again."""
    one, some = block_activations(LLAMA), block_activations(replace(LLAMA, tp=tp))
    gathered = 2 * 2 * TOKENS * LLAMA.spec.dim
    assert some.saved == (one.saved - gathered) / tp + gathered


def test_recomputation_keeps_inputs_only() -> None:
    stream = 2 * TOKENS * LLAMA.spec.dim
    full = replace(LLAMA, recompute="full")
    assert block_activations(full).saved == stream
    assert block_activations(full, blocks=4).saved == stream
    assert block_activations(replace(LLAMA, recompute="every-4"), blocks=4).saved == stream
    # Backward has all that was not kept, and one block's own.
    assert block_activations(full).backward_peak > block_activations(LLAMA).saved
    assert block_activations(full, blocks=4).backward_peak > 3 * block_activations(LLAMA).saved


def test_selective_is_between() -> None:
    kept = [block_activations(replace(LLAMA, recompute=mode)).saved for mode in ("full", "selective", "none")]
    assert kept == sorted(kept)


def test_logits_dominate_a_large_vocabulary() -> None:
    logits = TOKENS * LLAMA.spec.vocab_size
    found = head_activations(LLAMA)
    assert found.saved > 4 * logits  # log-probabilities in float32
    assert found.forward_peak > (2 + 4 + 4) * logits  # logits, cast up, log-probabilities


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 4])),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["none", "full", "selective"]),
    st.sampled_from(["ring", "allgather", "ulysses"]),
)
def test_many_layouts_at_once_are_as_one_by_one(
    layouts: list[tuple[int, int, int]], recompute: str, kind: str
) -> None:
    tp, cp, micro_batch = (np.array(column) for column in zip(*layouts, strict=True))
    setup = replace(LLAMA, recompute=recompute, cp_kind=kind)
    together = block_activations(replace(setup, tp=tp, cp=cp, micro_batch=micro_batch))
    for index, (one_tp, one_cp, rows) in enumerate(layouts):
        alone = block_activations(replace(setup, tp=one_tp, cp=one_cp, micro_batch=rows))
        chosen = [getattr(together, field.name)[index] for field in fields(Activations)]
        assert Activations(*chosen) == alone


def test_a_micro_batch_twice_as_large_takes_twice_as_much() -> None:
    two, four = (block_activations(replace(LLAMA, micro_batch=rows)).saved for rows in (2, 4))
    assert four == 2 * two
