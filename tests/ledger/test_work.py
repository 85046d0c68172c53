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
    assert (own.rows, own.columns, other.rows, other.columns) == (8192 // cp,) * 3 + (4096 // cp,)


def test_pieces_are_copied_cast_and_merged_one_by_one() -> None:
    """Each step of the ring weighs all that is there again: bytes grow with the ranks, for as many tokens."""
    copied = [
        sum(item.copied * item.count * cp for item in block_work(replace(LLAMA, cp=cp, cp_kind="ring")))
        for cp in (2, 4, 8)
    ]
    assert copied[2] - copied[1] == pytest.approx(2 * (copied[1] - copied[0]))
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
