"""What a compiled job takes on a GPU beside what the memory model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.comm.world import single_world
from fivefold.config import Job, resolve
from fivefold.hardware.cluster import find_cluster
from fivefold.ledger.setup import Setup
from fivefold.models.presets import PRESETS
from fivefold.planner.memory.fullest_rank import memory
from fivefold.training.run import TrainingRun

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GIB = 2**30


def job_of(preset: str, seq_len: int, micro_batch: int, **training: Any) -> Job:
    spec = PRESETS[preset].model_copy(update={"name": "cut", "layers": 6})
    settings: dict[str, Any] = {"steps": 3, "seq_len": seq_len, "precision": "bf16", "compile": True}
    settings |= {"global_batch": micro_batch, "micro_batch": micro_batch, **training}
    return resolve(
        Job.model_validate(
            {
                "model": spec.model_dump(exclude_none=True),
                "training": settings,
                "data": {"source": "random"},
                "optimizer": {"warmup": 1},
                "checkpoint": {"keep": 0},
                "run": {"tensorboard": False},
            }
        ),
        1,
        "cuda",
    )


def allocated(job: Job, folder: Path) -> float:
    """GiB at most over some steps."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with TrainingRun(job, single_world("cuda"), folder) as run:
        while not run.done:
            run.advance()
    return (torch.cuda.max_memory_allocated() - before) / GIB


@pytest.mark.parametrize(
    ("preset", "seq_len", "micro_batch"),
    [("llama3.2-1b", 4096, 2), ("llama3.2-1b", 4096, 6), ("gpt2-xl", 1024, 8), ("gpt2-xl", 1024, 32)],
)
def test_a_compiled_job_takes_what_is_promised(
    preset: str, seq_len: int, micro_batch: int, tmp_path: Path
) -> None:
    job = job_of(preset, seq_len, micro_batch)
    promised = float(memory(Setup.of(job), find_cluster("dgx-h200")).allocated) / GIB
    assert allocated(job, tmp_path) == pytest.approx(promised, rel=0.03)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_job_whose_loss_is_made_in_chunks_takes_what_is_promised(compiled: bool, tmp_path: Path) -> None:
    job = job_of("llama3.2-1b", 4096, 6, loss_chunk=5000, compile=compiled)
    promised = float(memory(Setup.of(job), find_cluster("dgx-h200")).allocated) / GIB
    assert allocated(job, tmp_path) == pytest.approx(promised, rel=0.03)


def test_a_compiled_job_that_recomputes_takes_no_more(tmp_path: Path) -> None:
    job = job_of("llama3.2-1b", 4096, 4, recompute="full")
    promised = float(memory(Setup.of(job), find_cluster("dgx-h200")).allocated) / GIB
    assert 0.8 * promised < allocated(job, tmp_path) < 1.03 * promised
