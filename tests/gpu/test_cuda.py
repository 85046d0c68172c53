"""What only a GPU can show. Skipped without one; run with `pytest tests/gpu` on a machine that has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.comm.compression import packed, unpacked
from fivefold.comm.world import single_world
from fivefold.config import Job, resolve
from fivefold.data.batch import collate
from fivefold.data.synthetic import RandomTokens
from fivefold.models.attention import AttentionCore, Context, attention_mask
from fivefold.models.initial import initial_values
from fivefold.training.run import TrainingRun

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODEL = {
    "vocab_size": 512,
    "dim": 256,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 512,
    "max_seq_len": 512,
}


def losses(folder: Path, **training: Any) -> list[float]:
    settings = {"steps": 6, "global_batch": 4, "seq_len": 256, **training}
    job = Job.model_validate(
        {
            "model": MODEL,
            "training": settings,
            "data": {"source": "stdlib", "cache": str(folder / "cache")},
            "optimizer": {"warmup": 2, "schedule": "constant"},
            "checkpoint": {"keep": 1},
        }
    )
    found = []
    with TrainingRun(resolve(job, 1, "cuda"), single_world("cuda"), folder / "run") as run:
        while not run.done:
            found.append(run.advance()["loss"])
    return found


def test_packed_kernel_errs_no_more_than_the_mask() -> None:
    """Both in bf16, against the mask in float64: outputs and gradients."""
    torch.manual_seed(0)
    dataset = RandomTokens(key=3, seq_len=200, vocab_size=50, document_length=40)
    batch = collate([dataset.sample(i) for i in range(3)], separate_documents=True).to("cuda")
    for window in (None, 17):
        inputs = [torch.randn(3, heads, 200, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
        mask = attention_mask(200, batch.tokens.device, batch.documents, window)

        def run(dtype: torch.dtype, context: Context, inputs: Any = inputs, window: Any = window) -> Any:
            leaves = [x.to(dtype).requires_grad_() for x in inputs]
            output = AttentionCore(window)(*leaves, context)
            return [output.double(), *(g.double() for g in torch.autograd.grad(output.sum(), leaves))]

        exact = run(torch.float64, Context(None, mask, mask))
        masked = run(torch.bfloat16, Context(None, mask, mask))
        packed = run(torch.bfloat16, Context(None, boundaries=batch.boundaries))
        for true, by_mask, by_boundaries in zip(exact, masked, packed, strict=True):
            allowed = 2 * (by_mask - true).abs().max() + 1e-3
            assert (by_boundaries - true).abs().max() <= allowed


def test_precisions_and_compile_agree(tmp_path: Path) -> None:
    exact = losses(tmp_path / "fp64", precision="fp64")
    assert exact[-1] < exact[0]
    variants: dict[str, dict[str, Any]] = {
        "fp32": {"precision": "fp32"},
        "bf16": {"precision": "bf16"},
        "fp16": {"precision": "fp16", "loss_scale": 1024.0},
        "compiled": {"precision": "bf16", "compile": True},
        "recomputed": {"precision": "bf16", "recompute": "full"},
        "selective": {"precision": "bf16", "recompute": "selective", "compile": True},
        "accumulated": {"precision": "bf16", "micro_batch": 1},
    }
    for name, training in variants.items():
        found = losses(tmp_path / name, **training)
        assert found == pytest.approx(exact, rel=1e-5 if name == "fp32" else 2e-2), name


def test_a_run_is_taken_up_where_it_stopped(tmp_path: Path) -> None:
    constant: dict[str, Any] = {"precision": "bf16"}
    whole = losses(tmp_path / "whole", **constant)
    parts = losses(tmp_path / "parts", steps=3, **constant)
    parts += losses(tmp_path / "parts", **constant)
    assert parts == pytest.approx(whole, rel=1e-3)


def test_initial_slabs_on_the_gpu() -> None:
    job = resolve(Job.model_validate({"model": MODEL}), 1, "cuda")
    name, shape = "head.output.weight", (512, 256)
    whole = initial_values(job.spec, name, shape, 0, device="cuda")
    slab = initial_values(job.spec, name, shape, 0, offset=(100, 0), local_shape=(50, 256), device="cuda")
    assert torch.equal(whole[100:150], slab)
    cpu = initial_values(job.spec, name, shape, 0)
    torch.testing.assert_close(whole.cpu(), cpu, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_gradients_are_rounded_as_on_a_cpu(kind: str) -> None:
    x = torch.randn(3, 1111, generator=torch.Generator().manual_seed(0))
    packed_here = packed(x, kind)
    assert torch.equal(packed(x.cuda(), kind).cpu(), packed_here)
    assert torch.equal(unpacked(packed_here.cuda(), kind, 1111).cpu(), unpacked(packed_here, kind, 1111))
