"""Small jobs that tests train under many layouts, and the programs their ranks run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from fivefold.axes.layout import Layout, Place
from fivefold.axes.messages import Received, pass_messages, spelled
from fivefold.axes.runtime.expert_split import ExchangingDispatch
from fivefold.axes.runtime.mesh import Mesh
from fivefold.config import Job, resolve
from fivefold.data.corpus import open_corpus
from fivefold.ledger.ledger import Ledger, sent
from fivefold.models.decoder import Decoder
from fivefold.models.moe import Moe
from fivefold.training.build import Built, build
from fivefold.training.checkpoint import Progress, Saver
from fivefold.training.learning_rate import learning_rate

SPEC: dict[str, Any] = {
    "vocab_size": 67,  # a prime: no rank count divides it, so padding is exercised
    "dim": 32,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "max_seq_len": 64,
}
TIED: dict[str, Any] = SPEC | {
    "tied": True,
    "norm": "layernorm",
    "positions": "learned",
    "activation": "gelu",
    "qkv_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
}
GEMMA: dict[str, Any] = SPEC | {
    "tied": True,
    "head_dim": 12,
    "activation": "geglu-tanh",
    "norm_unit_offset": True,
    "norm_after": True,
    "scale_embedding": True,
    "sliding_window": 5,
    "full_attention_every": 2,
    "attention_scale_dim": 7,
    "attention_softcap": 0.05,  # small enough to bend scores of initial weights
    "final_softcap": 0.5,
}


@dataclass(frozen=True)
class Case:
    """One layout of one small job."""

    name: str
    ranks: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=lambda: SPEC)
    communication: dict[str, Any] = field(default_factory=dict)

    def job(self) -> Job:
        training = {
            "global_batch": 8,
            "seq_len": 16,
            "precision": "fp64",
            "steps": 20,
            "clip": 1.0,
        } | self.training
        optimizer = {"lr": 1e-2, "warmup": 2} | self.optimizer
        job = Job.model_validate(
            {
                "model": self.spec,
                "training": training,
                "optimizer": optimizer,
                "layout": self.layout,
                "communication": self.communication,
                "data": {"source": "random"},
            }
        )
        return resolve(job, self.ranks, device="cpu")


def batches(job: Job, built: Built, start: int = 0) -> Any:
    """This rank's micro-batches, several documents a sequence, step after step."""
    corpus = open_corpus(
        "random",
        tokenizer="bytes",
        seq_len=job.training.seq_len,
        seed=job.training.seed,
        vocab_size=job.spec.vocab_size,
        document_length=7,
    )
    layout = Layout.of(job)
    assert job.training.micro_batch is not None
    return corpus.train_loader(
        global_batch=job.training.global_batch,
        micro_batch=job.training.micro_batch,
        rank=built.mesh.data_rank,
        ranks=layout.data_ranks,
        start_step=start,
        shares=built.shares,
    )


@cache
def mesh_of(layout: Layout) -> Mesh:
    """One mesh a layout in each rank: process groups have threads, and live as long as the rank."""
    return Mesh(layout, torch.device("cpu"))


def built_on_cpu(job: Job) -> Built:
    return build(job, torch.device("cpu"), mesh_of(Layout.of(job)))


def save(built: Built, run: Path, progress: Progress, keep: int = 2) -> Path:
    """Write one checkpoint and wait for it; every rank calls it."""
    saver = Saver(built, run, keep, background=False)
    saver.save(progress)
    saver.wait()
    if dist.is_initialized():
        dist.barrier()
    return run / "checkpoints" / f"step-{progress.step}"


def gradients(job: Job, steps: int = 0) -> dict[str, Any]:
    """One step's loss, gradient norm and every whole gradient, as this rank sees them.

    Then loss and gradient norm of as many AdamW `steps`, from the same weights.
    """
    built = built_on_cpu(job)
    with batches(job, built) as loader:
        micro_batches = next(iter(loader))
    tokens = built.step.count_tokens(micro_batches)
    loss = built.step.backward(micro_batches, tokens)
    found = built.step.collect()
    total, norm = built.step.totals(loss, found)
    result = {
        "loss": total.item(),
        "norm": norm.item(),
        "tokens": int(tokens),
        "gradients": {name: g.double() for name, g in built.weights.whole(found).items()},
    }
    built.weights.clear_gradients()
    return result | {"curve": curve(built, steps)}


def first_steps(job: Job, steps: int) -> dict[str, Any]:
    """Loss and gradient norm of the first optimizer steps, and every whole gradient as the first one used it.

    Those are summed, unscaled and clipped: what stands before the optimizer.
    """
    built = built_on_cpu(job)
    collect, update = built.step.collect, built.optimizer.step
    mine: list[list[torch.Tensor]] = []
    used: list[dict[str, torch.Tensor]] = []

    def collected() -> list[torch.Tensor]:
        mine.append(collect())
        return mine[-1]

    def updated(lr: float, scale: torch.Tensor | None = None) -> None:
        if not used:
            whole = built.weights.whole(as_used(mine[-1], scale))
            used.append({name: g.double() for name, g in whole.items()})
        update(lr, scale)

    built.step.collect, built.optimizer.step = collected, updated  # type: ignore[method-assign]
    return {"curve": curve(built, steps), "gradients": used[0]}


def as_used(gradients: list[torch.Tensor], scale: torch.Tensor | None) -> list[torch.Tensor]:
    """Gradients as an optimizer uses them that is told to multiply them by `scale`."""
    if scale is None:
        return [gradient.clone() for gradient in gradients]
    return [gradient.to(scale.dtype) * scale for gradient in gradients]


def losses(job: Job) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step of the job."""
    return curve(built_on_cpu(job), job.training.steps)


def curve(built: Built, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first steps of a job."""
    found = []
    with batches(built.job, built) as loader:
        for step in range(1, steps + 1):
            lr = learning_rate(built.job.optimizer, step, built.job.training.steps)
            result = built.step(next(loader), lr, step)
            found.append((result.loss, result.grad_norm))
    return found


OF_EXPERTS = {("all_to_all", "ep"), ("all_reduce", "cp")}


def passes(job: Job, place: Place, axis: str, received: Received | None = None) -> Ledger:
    """What the forward and backward passes of a step send along one axis, by the ledger."""
    messages = [
        message
        for message in pass_messages(job, place, received)
        if ((message.operation, message.group) in OF_EXPERTS if axis == "ep" else message.group == axis)
    ]
    return Ledger(messages=sent(spelled(messages, Layout.of(job))))


def log_received(model: Decoder) -> dict[int, list[int]]:
    """By layer, a list to which each backward pass from now on appends how many tokens this rank received.

    That is all that `account` has to be told of a live run under learned routing; empty without ep.
    """
    logs: dict[int, list[int]] = {}
    for layer, block in model.blocks.items():
        moe = cast(Moe, block.mlp)
        if isinstance(moe.dispatch, ExchangingDispatch):
            log = logs[int(layer)] = list[int]()
            moe.experts.register_forward_hook(partial(_note_rows, log))
    return logs


def _note_rows(log: list[int], experts: Any, args: Any, rows: torch.Tensor) -> None:
    """Write down how many rows came: in backward, which runs once however often forward is run."""
    count = len(rows)
    if rows.requires_grad:
        rows.register_hook(lambda _: log.append(count))
