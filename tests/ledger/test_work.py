"""The work of a block: against the FLOP formula, and what recomputation repeats; it is traced elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.ledger.work import Work, block_work, head_work, recomputed
from fivefold.models.flops import flops_per_token
from fivefold.models.presets import PRESETS

LLAMA = Setup(PRESETS["llama3-8b"], 8192, 128, PRECISIONS["bf16"])


def total(work: list[Work]) -> float:
    return float(sum(item.flops * item.count for item in work))


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "mixtral-8x7b", "gemma2-27b"])
def test_forward_flops_are_those_of_the_formula(name: str) -> None:
    setup = replace(LLAMA, spec=PRESETS[name], seq_len=2048)
    forward = [item for item in block_work(setup) if item.phase == "forward"]
    forward_head = [item for item in head_work(setup) if item.phase == "forward"]
    expected = flops_per_token(setup.spec, 2048, "full")
    found = setup.spec.layers * total(forward) + total(forward_head)
    assert found / 2048 == pytest.approx(expected.forward, rel=1e-6)


@pytest.mark.parametrize("kind", ["ring", "allgather"])
@pytest.mark.parametrize("cp", [2, 4, 16])
def test_pieces_compute_half_of_what_they_do_not_see_less(cp: int, kind: str) -> None:
    """All ranks together: the diagonal blocks whole, of the others a half. What is visible stays the same."""

    def attention(setup: Setup) -> list[Work]:
        return [item for item in block_work(setup) if item.kind == "attention" and item.phase == "forward"]

    own, other = attention(replace(LLAMA, cp=cp, cp_kind=kind))
    [square] = attention(LLAMA)
    assert total([own, other]) * cp == pytest.approx(square.flops * (1 + 1 / cp) / 2)
    seen = own.flops * own.causal + other.count * other.flops
    assert seen * cp == pytest.approx(square.flops * square.causal)
    at_once = cp - 1 if kind == "allgather" else 1
    assert other.count * at_once == cp - 1
    assert (own.rows, own.columns, other.rows) == (8192 // cp,) * 3
    assert other.columns == at_once * 4096 // cp


def test_pieces_are_put_together_from_what_each_gives() -> None:
    """Each step of the ring gives a result of all queries: bytes grow with the ranks, for as many tokens, and
    once more where results are put together in between. Gathered blocks give two.
    """
    copied = {
        (kind, cp): sum(
            item.copied * item.count * cp for item in block_work(replace(LLAMA, cp=cp, cp_kind=kind))
        )
        for kind in ("ring", "allgather")
        for cp in (2, 4, 8)
    }
    at_2, at_4, at_8 = (copied["ring", cp] for cp in (2, 4, 8))
    tokens = LLAMA.seq_len * LLAMA.micro_batch * LLAMA.spec.heads * LLAMA.spec.head_dim
    in_between = 2 * 2 * (4 + 4) * tokens  # at 8 ranks twice, forward and backward, written and read
    assert at_8 - at_4 == pytest.approx(2 * (at_4 - at_2) + in_between)
    assert copied["allgather", 8] < at_8
    assert not any(item.copied for item in block_work(LLAMA))


@pytest.mark.parametrize("chunk", [1000, 8192, 10_000])
def test_a_loss_in_chunks_computes_as_much_and_reads_weights_for_each(chunk: int) -> None:
    whole, parts = head_work(LLAMA), head_work(replace(LLAMA, loss_chunk=chunk))
    assert total(parts) == total(whole)
    products = [item for item in parts if item.kind == "matmul"]
    assert {item.phase for item in products} == {"forward"}
    least = LLAMA.spec.vocab_size * LLAMA.spec.dim
    once = sum(item.moved for item in whole if item.kind == "matmul")
    chunks = -(-8192 // chunk)
    # In bf16 both products with the weight read it, and its gradient is read and written in float32; that of
    # the input is written so.
    more = sum(item.moved * item.count for item in products) - once
    wider = 2 * 8192 / LLAMA.spec.vocab_size
    assert more / least == pytest.approx(2 * 2 * chunks + 8 * chunks - (2 * 2 + 2) + wider)


def test_the_last_recomputed_block_stops_before_its_last_product() -> None:
    work = block_work(LLAMA)
    all_of_it, less = recomputed(work), recomputed(work, last=True)
    down = [item for item in all_of_it if item.what == "mlp.down"]
    assert len(down) == 1
    assert total(all_of_it) - total(less) == total(down)
    assert {item.phase for item in less} == {"backward-input"}


def test_experts_in_8_bits_by_hand() -> None:
    """Eight of 2048 tokens each: a byte a number read, two written; every number of all of them is cast."""
    spec = PRESETS["mixtral-8x7b"]
    work = block_work(replace(LLAMA, spec=spec, fp8="tensorwise"))
    up = next(item for item in work if item.what == "mlp.experts.up")
    assert up.fp8
    assert up.moved == 8 * (2048 * spec.dim + spec.dim * spec.ffn + 2 * 2048 * spec.ffn)
    forward, backward = (item.moved for item in work if item.what == "mlp.experts.casts")
    # Rows are read twice, gate's and up's together, and written; weights are read once.
    rows, stack = 8 * 2048, 8 * spec.dim * spec.ffn
    assert forward == 5 * rows * (spec.dim + spec.ffn) + 3 * 3 * stack
    # Gradients likewise; and all that is multiplied is put into another order.
    gradients, read = rows * (2 * spec.ffn + spec.dim), rows * (2 * spec.dim + spec.ffn)
    assert backward == 3 * 3 * stack + 5 * gradients + 2 * (3 * stack + gradients + read)
    assert not any(item.what == "mlp.experts.casts" for item in block_work(replace(LLAMA, spec=spec)))


def test_casts_to_8_bits_are_passes_over_inputs_gradients_and_weights_by_hand() -> None:
    """Bytes of a Llama's attention: query, key and value read one input."""
    tokens, dim, keys = 8192, 4096, 1024
    weights = 2 * dim * dim + 2 * dim * keys
    inputs, gradients = 2 * tokens * dim, tokens * (2 * dim + 2 * keys)
    for scales, one in (("tensorwise", 2 + 1), ("rowwise", 2 + 2 + 1)):
        work = block_work(replace(LLAMA, fp8=scales, fp8_small=True))
        forward, backward = (item for item in work if item.what == "attention.casts")
        assert forward.moved == (2 + 2 + 1 + 1) * inputs + one * weights
        assert backward.moved == (2 + 2 + 1 + 1) * gradients + one * weights
