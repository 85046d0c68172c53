"""Large worlds: four axes at once on 16 live ranks, and one rank of 16,384 on a group that sends nothing."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.axes.checks import check
from fivefold.axes.pieces import pieces, size_of
from fivefold.config import Job, resolve
from fivefold.data.batch import Batch
from fivefold.replay.account import account
from fivefold.training.build import build
from fivefold.training.launch import train
from fivefold.training.norm import clipping
from tests.tracer import MessageTracer

pytestmark = pytest.mark.slow


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(900)
def test_four_axes_train_on_sixteen_ranks_as_on_one(tmp_path: Path) -> None:
    description: dict[str, Any] = {
        "model": {"preset": "tiny", "layers": 4, "dim": 64, "ffn": 64},
        "data": {"source": "random"},
        "training": {"steps": 3, "global_batch": 8, "micro_batch": 1, "seq_len": 32, "precision": "fp64"},
        "optimizer": {"warmup": 0},
        "run": {"tensorboard": False},
    }
    four = {"layout": {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2}}
    train(Job.model_validate(description), 1, tmp_path / "one")
    train(Job.model_validate(description | four), 16, tmp_path / "four")
    one, sixteen = metrics(tmp_path / "one"), metrics(tmp_path / "four")
    assert len(one) == len(sixteen) == 3
    for alone, together in zip(one, sixteen, strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-10)
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-9)


WORLD, LENGTH = 16_384, 131_072


def llama3_405b() -> Job:
    job = Job.model_validate(
        {
            "model": {"preset": "llama3-405b"},
            "data": {"source": "random"},
            "training": {"global_batch": 128, "micro_batch": 1, "seq_len": LENGTH, "precision": "bf16"},
            "layout": {"tp": 8, "cp": 16, "pp": 16, "dp_shard": 8},
        }
    )
    return resolve(job, WORLD)


def step_of_one_rank(rank: int, answer: Any) -> None:
    """Build and step one rank of the world, on tensors without memory; two steps, the second one traced."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    job = llama3_405b()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    built = build(job, torch.device("cpu"), memory=mode)
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    batches = [Batch(tokens, tokens, None, LENGTH)] * 16
    tracer = MessageTracer(built.mesh)
    with mode, tracer:
        count = built.step.count_tokens(batches)
        loss = built.step.backward(batches, count)
        gradients = built.step.collect()
        _, norm = built.step.totals(loss, gradients)
        built.optimizer.step(1e-4, clipping(norm, 1.0))
    place = built.mesh.place
    answer.put(
        {
            "place": (place.pp, place.dp_shard, place.cp, place.tp),
            "blocks": len(built.parts[0].blocks),
            "elements": sum(gradient.numel() for gradient in gradients),
            "expected": size_of(pieces(job, place), built.mesh.layout, place).updated,
            "different": [str(d) for d in (tracer.traffic() - account(job, place).traffic()).items()],
            "missing": [str(d) for d in (account(job, place).traffic() - tracer.traffic()).items()],
        }
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rank", "place"),
    [(0, (0, 0, 0, 0)), (8 * 1024 + 517, (8, 4, 0, 5)), (WORLD - 1, (15, 7, 15, 7))],
    ids=["first stage", "a middle stage", "last stage"],
)
def test_one_rank_of_llama3_405b_on_16384(rank: int, place: tuple[int, ...]) -> None:
    assert check(llama3_405b()) == []
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=step_of_one_rank, args=(rank, answers))
    process.start()
    found = answers.get(timeout=800)
    process.join()
    assert found["place"] == place
    assert found["blocks"] in (7, 8)
    assert found["elements"] == found["expected"]
    assert found["different"] == found["missing"] == []


if __name__ == "__main__":
    step_of_one_rank(int(sys.argv[1]), type("Print", (), {"put": staticmethod(print)}))
