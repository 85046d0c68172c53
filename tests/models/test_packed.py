"""The packed kernel exists on GPUs only; here a slow stand-in for it tests what surrounds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.data.batch import collate
from fivefold.data.dataset import Sample
from fivefold.data.synthetic import RandomTokens
from fivefold.models import packed
from fivefold.models.attention import AttentionCore, Context, attention_mask


def kernel_by_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    also_begins: Tensor,
    longest: int,
    also_longest: int,
    *,
    window_size: tuple[int, int],
) -> Tensor:
    """What the GPU's kernel computes, one document after the other. [T, H, D] each."""
    assert torch.equal(begins, also_begins)
    assert begins[-1] == query.shape[0]
    left, right = window_size
    assert right == 0
    outputs = []
    for start, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        if start == end:
            continue
        assert end - start <= longest
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        visible = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if left >= 0:
            visible = visible.triu(-left)
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 5])
def test_boundaries_say_what_the_mask_says(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(packed, "_kernel", lambda: kernel_by_documents)
    monkeypatch.setattr(packed, "KERNEL_TAKES_GROUPS", False)
    dataset = RandomTokens(key=3, seq_len=24, vocab_size=50, document_length=6)
    batch = collate([dataset.sample(i) for i in range(3)], separate_documents=True)
    assert batch.boundaries is not None
    torch.manual_seed(0)
    shapes = [(3, heads, 24, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    core = AttentionCore(window)
    mask = attention_mask(24, torch.device("cpu"), batch.documents, window)
    results: list[Any] = []
    for context in (Context(None, mask, mask), Context(None, boundaries=batch.boundaries)):
        output = core(*inputs, context)
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for by_mask, by_boundaries in zip(*results, strict=True):
        torch.testing.assert_close(by_boundaries, by_mask, rtol=1e-12, atol=1e-12)


def test_rows_are_documents_of_their_own() -> None:
    one = torch.zeros(9, dtype=torch.int64).numpy()
    batch = collate([Sample(one, one)] * 3, separate_documents=True)
    assert batch.boundaries is not None
    assert batch.boundaries.tolist() == [0, 8, 16, 24]
    assert torch.equal(packed.row_boundaries(3, 8, torch.device("cpu")), batch.boundaries)
