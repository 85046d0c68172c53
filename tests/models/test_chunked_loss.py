"""The loss in chunks is the loss: value and gradients, in every dtype, and never all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.models.chunked_loss import chunked_loss, cross_entropy
from fivefold.models.decoder import Head
from fivefold.models.loss import IGNORED, summed_cross_entropy
from fivefold.models.norm import soft_cap
from fivefold.models.spec import ModelSpec

Loss = Callable[[Tensor, Tensor], Tensor]
DIM = 8


def drawn(tokens: int, words: int, dim: int = DIM, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, dim] and weight [words, dim] in float64, and targets [tokens], one in five to be ignored."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, dim, generator=source, dtype=torch.float64)
    weight = torch.randn(words, dim, generator=source, dtype=torch.float64) / dim**0.5
    targets = torch.randint(words, (tokens,), generator=source)
    return x, weight, targets.masked_fill(torch.rand(tokens, generator=source) < 0.2, IGNORED)


def in_chunks(targets: Tensor, chunk: int, cap: float | None = None) -> Loss:
    return lambda x, weight: chunked_loss(
        x, weight, targets, chunk, lambda logits, some: cross_entropy(logits, some, cap)
    )


def at_once(targets: Tensor, cap: float | None = None) -> Loss:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        logits = x @ weight.t()
        return summed_cross_entropy(logits if cap is None else soft_cap(logits, cap), targets)

    return loss


def found(loss: Loss, x: Tensor, weight: Tensor, times: float = 1.0) -> list[Tensor]:
    """The loss and its gradients, which backward gets multiplied by a number, in float64."""
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    value = loss(x, weight)
    (value * times).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [value.detach().double(), x.grad.double() / times, weight.grad.double() / times]


def same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12 * max(1.0, float(other.abs().max())))


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 24),
    words=st.integers(1, 30),
    chunk=st.integers(1, 30),
    cap=st.sampled_from((None, 0.7, 20.0)),
    times=st.sampled_from((1.0, 0.37, 3e4)),
    seed=st.integers(0, 5),
)
def test_as_all_at_once(
    tokens: int, words: int, chunk: int, cap: float | None, times: float, seed: int
) -> None:
    x, weight, targets = drawn(tokens, words, seed=seed)
    ours = found(in_chunks(targets, chunk, cap), x, weight, times)
    same(ours, found(at_once(targets, cap), x, weight, times))


@pytest.mark.parametrize("ignored", [slice(0, 4), slice(4, 8), slice(0, 12)])
def test_chunks_of_which_no_token_counts(ignored: slice) -> None:
    x, weight, targets = drawn(12, 11)
    targets[:] = torch.arange(12) % 11
    targets[ignored] = IGNORED
    ours = found(in_chunks(targets, 4), x, weight)
    same(ours, found(at_once(targets), x, weight))
    assert not ours[1][ignored].any()


def test_logits_far_apart_do_not_overflow() -> None:
    x, weight, targets = drawn(6, 9)
    same(found(in_chunks(targets, 4), 2000 * x, weight), found(at_once(targets), 2000 * x, weight))


def error(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(
    ("dtype", "times", "cap"),
    [
        (torch.float32, 0.01, None),
        (torch.bfloat16, 1 / 300, None),
        (torch.bfloat16, 1 / 300, 2.0),
        (torch.float16, 65536 / 300, None),
        (torch.float16, 65536 / 1_000_000, None),  # of a batch of which this is a small part
        (torch.float16, 65536 / 1_000_000, 2.0),
    ],
)
def test_rounds_no_worse_than_all_at_once(dtype: torch.dtype, times: float, cap: float | None) -> None:
    """A vocabulary of which each word is as likely as float16 just cannot say."""
    x, weight, targets = (part.to(dtype) if part.is_floating_point() else part for part in drawn(256, 40_000))
    true = found(at_once(targets, cap), x.double(), weight.double())
    plain = found(at_once(targets, cap), x, weight, times)
    ours = found(in_chunks(targets, 100, cap), x, weight, times)
    for mine, theirs, right in zip(ours, plain, true, strict=True):
        assert error(mine, right) <= 1.02 * error(theirs, right) + 1e-7


def test_probabilities_that_float16_has_no_numbers_for_are_not_lost() -> None:
    """One word is nearly sure, and all others have a chance of a few in ten millions."""
    x, weight, targets = drawn(64, 20_000)
    x[:, 0], weight[0], targets[:] = 3.0, 0.0, 0
    weight[0, 0] = 5.0
    x, weight = x.half(), weight.half()
    true, plain, ours = (
        found(at_once(targets), x.double(), weight.double())[2][1:],
        found(at_once(targets), x, weight, 65536 / 300)[2][1:],
        found(in_chunks(targets, 30), x, weight, 65536 / 300)[2][1:],
    )
    assert error(ours, true) <= 1.1 * error(plain, true) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_weight_is_rounded_once_however_many_chunks(dtype: torch.dtype) -> None:
    x, weight, targets = (part.to(dtype) if part.is_floating_point() else part for part in drawn(512, 50))
    true = found(at_once(targets), x.double(), weight.double())
    few, many = (found(in_chunks(targets, chunk), x, weight) for chunk in (512, 2))
    assert error(many[2], true[2]) <= 1.1 * error(few[2], true[2])


def test_a_vocabulary_that_ranks_share() -> None:
    """Two parts of the logits, put together as ranks would: each pass a rank finds what the other found."""
    x, weight, targets = drawn(10, 13)
    value, _, weight_grad = found(at_once(targets), x, weight)
    parts = x @ weight[:7].t(), x @ weight[7:].t()
    shared: list[list[Tensor]] = [[], []]

    def largest(rank: int) -> Callable[[Tensor, str], Tensor]:
        def across(numbers: Tensor, operation: str) -> Tensor:
            shared[rank].append(numbers)
            return numbers

        return across

    for rank, part in enumerate(parts):
        cross_entropy(part.clone(), targets, None, 7 * rank, largest(rank))
    top = torch.maximum(shared[0][0], shared[1][0])
    sums = [s[1] * torch.stack(((s[0] - top).exp(), torch.ones_like(top))) for s in shared]
    mine = [((targets >= 7 * r) & (targets < 7 + 6 * r)) for r in (0, 1)]
    sums = [
        s + torch.stack((torch.zeros_like(top), (shared[r][0] - top) * mine[r])) for r, s in enumerate(sums)
    ]
    together = {"max": top, "sum": sums[0] + sums[1]}
    for rank, part in enumerate(parts):
        loss, gradient = cross_entropy(part.clone(), targets, None, 7 * rank, lambda _, how: together[how])
        torch.testing.assert_close(loss, value, rtol=1e-12, atol=1e-12)
        rows = slice(0, 7) if rank == 0 else slice(7, 13)
        torch.testing.assert_close(gradient.t() @ x, weight_grad[rows], rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most elements that any new tensor had."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and _memory(each) not in given:
                self.elements = max(self.elements, each.numel())
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("learns", [True, False])
def test_logits_of_all_tokens_are_never_there(dtype: torch.dtype, learns: bool) -> None:
    """With a vocabulary and a sequence much larger than all else."""
    tokens, words, chunk = 200, 300, 30
    head = Head(ModelSpec(vocab_size=words, dim=8, layers=1, heads=1, kv_heads=1, ffn=8, max_seq_len=tokens))
    head.to(dtype)
    head.loss_chunk = chunk
    x = torch.randn(2, tokens // 2, 8, dtype=dtype, requires_grad=True)
    with Largest() as seen, torch.set_grad_enabled(learns):
        loss = head(x, torch.zeros(2, tokens // 2, dtype=torch.int64))
        if learns:
            loss.backward()
    assert seen.elements == chunk * words


def test_no_gradients_are_made_where_none_are_wanted() -> None:
    x, weight, targets = drawn(12, 50)
    with torch.no_grad(), Largest() as seen:
        chunked_loss(x.requires_grad_(), weight.requires_grad_(), targets, 2, cross_entropy)
    assert seen.elements < weight.numel()


def test_logits_are_what_they_are_without_chunks() -> None:
    head = Head(ModelSpec(vocab_size=11, dim=8, layers=1, heads=1, kv_heads=1, ffn=8, max_seq_len=8))
    x = torch.randn(1, 5, 8)
    whole = head(x, None)
    head.loss_chunk = 2
    assert torch.equal(head(x, None), whole)
