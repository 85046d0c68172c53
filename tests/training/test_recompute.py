"""Recomputation keeps less from forward to backward, as much less as documented, and computes once more."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.ledger.setup import segment_length
from fivefold.models.decoder import Block
from fivefold.training.build import Built, build
from tests.cases import SPEC, Case, batches

MODES = ("none", "selective", "full", "every-2", "sqrt", "every-3", "every-4")
BATCH, LENGTH, DIM, LAYERS = 8, 16, SPEC["dim"], SPEC["layers"]
BLOCK_INPUT = BATCH * LENGTH * DIM * 8  # bytes, in float64


class LiveBytes(TorchDispatchMode):
    """Watches every tensor that is made; `count` gives the bytes of those still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def count(self) -> int:
        return sum(size for reference, size in self.made.values() if not reference.expired())


def built_with(mode: str) -> Built:
    return build(Case(mode, training={"recompute": mode}).job(), torch.device("cpu"))


@cache
def kept_for_backward(mode: str) -> int:
    """Bytes alive after the forward pass that were not before it."""
    built = built_with(mode)
    with batches(built.job, built) as loader:
        (batch,) = next(loader)
    live = LiveBytes()
    with live:
        loss = built.model(batch.tokens, batch.targets, batch.documents)
        kept = live.count()
    assert loss.requires_grad  # and so alive, with all that its backward needs
    return kept


def test_each_mode_keeps_less_than_the_one_before() -> None:
    kept = {mode: kept_for_backward(mode) for mode in MODES}
    assert kept["none"] > kept["selective"] > kept["full"] > kept["every-2"] > kept["every-4"]
    assert kept["sqrt"] == kept["every-2"]  # of four layers


def test_whole_layers_keep_their_segments_inputs_and_nothing_else() -> None:
    """The embedding's output is the first of them; the last segment's output is kept by the head."""
    one_segment = kept_for_backward("every-4")
    assert kept_for_backward("full") - one_segment == (LAYERS - 1) * BLOCK_INPUT
    assert kept_for_backward("every-2") - one_segment == BLOCK_INPUT
    assert kept_for_backward("every-3") - one_segment == BLOCK_INPUT


def test_selective_keeps_matrix_products_and_attention() -> None:
    """A block has four projections of attention, its result and its sums, and three matrices of the mlp."""
    heads, kv_heads, ffn, head_dim = SPEC["heads"], SPEC["kv_heads"], SPEC["ffn"], DIM // SPEC["heads"]
    tokens = BATCH * LENGTH
    projections = tokens * 8 * (heads * head_dim + 2 * kv_heads * head_dim + DIM)
    attention = tokens * 8 * (heads * head_dim + heads)
    mlp = tokens * 8 * (2 * ffn + DIM)
    least = LAYERS * (projections + attention + mlp)
    assert kept_for_backward("selective") - kept_for_backward("full") == pytest.approx(least, rel=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_every_block_is_run_forward_once_more_or_not_at_all(mode: str) -> None:
    built = built_with(mode)
    runs = dict.fromkeys(range(LAYERS), 0)

    def count(number: int) -> Any:
        def hook(*unused: Any) -> None:
            runs[number] += 1

        return hook

    # Inside the block, so that it is seen whichever way the block is called again.
    for number, block in enumerate(built.model.blocks.values()):
        assert isinstance(block, Block)
        block.attention_norm.register_forward_pre_hook(count(number))
    with batches(built.job, built) as loader:
        (batch,) = next(loader)
    loss = built.model(batch.tokens, batch.targets, batch.documents)
    assert set(runs.values()) == {1}
    loss.backward()
    assert set(runs.values()) == {1 if mode == "none" else 2}


@given(st.integers(1, 200), st.integers(1, 300))
def test_segments(layers: int, every: int) -> None:
    assert segment_length("none", layers) is None
    assert segment_length("selective", layers) is None
    assert segment_length("full", layers) == 1
    assert segment_length(f"every-{every}", layers) == min(every, layers)
    root = segment_length("sqrt", layers)
    assert root is not None
    assert 1 <= root <= layers
    assert abs(root - layers**0.5) <= 0.5
