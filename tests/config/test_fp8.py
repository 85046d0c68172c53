"""`training.fp8` and its settings: what goes together, what is refused, and which layers take part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fivefold.axes.checks import check, possible
from fivefold.axes.fp8 import in_fp8, told, weights
from fivefold.config import Job, load, resolve
from fivefold.ledger.fp8 import pays
from fivefold.ledger.precision import PRECISIONS
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.problems import BadInput, Problem

LLAMA = Setup(PRESETS["llama3-8b"], 8192, 128, PRECISIONS["bf16"])


def job_of(*words: str, preset: str = "tiny", ranks: int = 1, device: Any = "cpu") -> Job:
    return resolve(load(None, preset, [f"--{word}" for word in words]), ranks, device)


def refused(*words: str, preset: str = "tiny") -> dict[str, Problem]:
    with pytest.raises(BadInput) as caught:
        job_of(*words, preset=preset)
    return {problem.key: problem for problem in caught.value.problems}


@pytest.mark.parametrize("scales", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_precision_left_open_is_bf16(scales: str, device: str) -> None:
    job = job_of(f"training.fp8={scales}", "training.fp8_small=true", device=device)
    assert job.training.precision == "bf16"
    assert Setup.of(job).fp8 == scales
    assert resolve(job, 1) == job


@pytest.mark.parametrize("precision", ["fp16", "fp32", "fp64"])
def test_another_precision_is_refused(precision: str) -> None:
    problem = refused("training.fp8=rowwise", f"training.precision={precision}")["training.fp8"]
    assert "'rowwise'" in problem.message
    assert precision in problem.message
    assert "bf16" in problem.hint


@pytest.mark.parametrize("word", ["fp8_first=1", "fp8_last=2", "fp8_head=true", "fp8_small=true"])
def test_a_setting_of_fp8_without_it_is_refused(word: str) -> None:
    key, _, value = word.partition("=")
    problem = refused(f"training.{word}")[f"training.{key}"]
    assert problem.message == f"{value} without training.fp8"


def test_no_block_left_is_refused() -> None:
    problem = refused("training.fp8=rowwise", "training.fp8_first=4", "training.fp8_last=4")
    assert "8 blocks stay in bf16, and the model has 8" in problem["training.fp8_first"].message


def test_hidden_tp_messages_are_refused() -> None:
    words = "training.fp8=rowwise", "layout.tp=2", "communication.tp_overlap=true"
    with pytest.raises(BadInput) as caught:
        job_of(*words, ranks=2, device="cuda")
    assert [problem.key for problem in caught.value.problems] == ["communication.tp_overlap"]


def test_where_no_layer_takes_part_that_is_refused_and_each_is_named() -> None:
    (problem,) = check(job_of("training.fp8=tensorwise"))
    assert problem.key == "training.fp8"
    assert "mlp.down (too small to gain)" in problem.message
    assert "fp8_small" in problem.hint
    assert check(job_of("training.fp8=tensorwise", "training.fp8_small=true")) == []
    odd = (
        "training.fp8=tensorwise",
        "training.fp8_small=true",
        "training.seq_len=17",
        "training.global_batch=1",
    )
    (problem,) = check(job_of(*odd))
    assert "attention.query (17 tokens: not a multiple of 16)" in problem.message
    assert "fp8_small" not in problem.hint


def test_torchaos_rule() -> None:
    assert not pays("tensorwise", 4096, 1024)
    assert pays("tensorwise", 4096, 1025)
    assert pays("tensorwise", 4097, 1024)
    assert not pays("rowwise", 8192, 2048)
    assert not pays("rowwise", 1024, 8192)
    assert not pays("rowwise", 2048, 4096)
    assert pays("rowwise", 2049, 4096)
    assert pays("rowwise", 2048, 4097)


def test_the_rule_is_of_shapes_after_tp_has_cut() -> None:
    whole = replace(LLAMA, fp8="rowwise")
    most = ["attention.query", "attention.output", "mlp.gate", "mlp.up", "mlp.down"]
    assert in_fp8(whole) == most
    assert in_fp8(replace(whole, tp=2)) == ["mlp.gate", "mlp.up", "mlp.down"]
    assert in_fp8(replace(whole, tp=8)) == []
    several = replace(whole, tp=np.array([1, 2, 4, 8]), seq_len=4096)
    alone = [bool(possible(replace(several, tp=tp))) for tp in (1, 2, 4, 8)]
    assert possible(several).tolist() == alone == [True, True, True, False]


def test_the_head_takes_part_only_where_asked_and_if_every_ranks_part_divides() -> None:
    whole = replace(LLAMA, fp8="tensorwise", fp8_small=True)
    assert "head.output" not in in_fp8(whole)
    with_head = replace(whole, fp8_head=True)
    assert "head.output" in in_fp8(with_head)
    odd = replace(with_head, spec=LLAMA.spec.model_copy(update={"vocab_size": 128_248}), tp=2)
    assert -(-128_248 // 2) % 16 != 0
    assert "head.output" not in in_fp8(odd)
    uneven = replace(odd, spec=LLAMA.spec.model_copy(update={"vocab_size": 31}))  # 16 and 15
    assert "head.output" not in in_fp8(uneven)


def test_the_line_that_a_job_begins_with_names_every_layer() -> None:
    setup = replace(LLAMA, fp8="tensorwise", fp8_first=1, fp8_last=2, fp8_head=True)
    assert told(setup) == (
        "tensorwise: attention.query, attention.output, mlp.gate, mlp.up, mlp.down of blocks 1-29; "
        "head.output. In bf16: attention.key, attention.value (too small to gain); blocks 0, 30-31"
    )
    experts = replace(setup, spec=PRESETS["mixtral-8x7b"], fp8_first=0, fp8_last=0)
    assert "mlp.router (in float32)" in told(experts)
    assert "mlp.experts.gate, mlp.experts.up, mlp.experts.down of blocks 0-31; head.output" in told(experts)


def test_weights_that_are_scaled_leave_out_blocks_at_the_ends() -> None:
    names = weights(replace(LLAMA, fp8="tensorwise", fp8_first=1, fp8_last=2))
    assert names[0] == "blocks.1.attention.query.weight"
    assert names[-1] == "blocks.29.mlp.down.weight"
    assert len(names) == 29 * 5


def test_experts_take_part_by_the_shape_of_one_whatever_the_number_of_tokens() -> None:
    setup = replace(LLAMA, spec=PRESETS["mixtral-8x7b"], fp8="tensorwise", seq_len=100)
    stacks = ["mlp.experts.gate", "mlp.experts.up", "mlp.experts.down"]
    assert in_fp8(setup) == stacks
    assert "attention.output (100 tokens: not a multiple of 16)" in told(setup)
    narrow = setup.spec.model_copy(update={"ffn": 24})
    assert in_fp8(replace(setup, spec=narrow, fp8_small=True)) == []
    assert "mlp.experts.down (24 inputs: not a multiple of 16)" in told(
        replace(setup, spec=narrow, fp8_small=True, seq_len=8192)
    )
