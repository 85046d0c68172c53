"""One rank's life: build, take up where the run stopped, train, validate, save."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fivefold.axes.layout import Layout
from fivefold.config import Job
from fivefold.data.batch import Batch
from fivefold.data.corpus import Corpus, open_corpus
from fivefold.hardware.devices import find_device
from fivefold.ledger.precision import PRECISIONS
from fivefold.models.flops import flops_per_token
from fivefold.training.build import Built, build
from fivefold.training.checkpoint import Progress, load_latest, save
from fivefold.training.metrics import MetricsLog, peak_memory_gib
from fivefold.training.optimizer import learning_rate
from fivefold.training.terminal import Display

if TYPE_CHECKING:
    from fivefold.comm.world import World


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    steps: int
    loss: float
    val_loss: float | None
    tokens: int
    seconds: float
    folder: str


def corpus_of(job: Job, progress: bool = False) -> Corpus:
    """Open (and tokenise, the first time) the job's data."""
    source = job.data.source
    mix: str | list[tuple[str, float]]
    if isinstance(source, str):
        mix = source
    else:
        mix = [(entry, 1.0) if isinstance(entry, str) else (entry.path, entry.weight) for entry in source]
    return open_corpus(
        mix,
        tokenizer=job.data.tokenizer,
        text_field=job.data.text_field,
        heldout=job.data.heldout,
        seq_len=job.training.seq_len,
        seed=job.training.seed,
        separate_documents=job.data.separate_documents,
        vocab_size=job.spec.vocab_size,
        cache=job.data.cache,
        workers=job.data.workers,
        progress=progress,
    )


def attention_kernels(device: torch.device) -> AbstractContextManager[Any]:
    """Prefer the fastest attention kernel there is: cuDNN's on recent GPUs; on a CPU there is no choice."""
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)


class Meter:
    """Turns a step's time into the figures people compare: tokens per second, MFU, HFU."""

    def __init__(self, job: Job, device: torch.device):
        self.tokens_per_step = job.training.global_batch * job.training.seq_len
        self.ranks = Layout.of(job).ranks
        flops = flops_per_token(job.spec, job.training.seq_len, attention="causal")
        self.model_flops = flops.model
        self.hardware_flops = flops.hardware(job.training.recompute)
        known = find_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak = known.peak_flops.get(PRECISIONS[job.training.precision].compute) if known else None

    def figures(self, seconds: float) -> dict[str, float | None]:
        rate = self.tokens_per_step / seconds
        per_device = rate / self.ranks
        return {
            "step_time_s": seconds,
            "tokens_per_s": rate,
            "tokens_per_s_per_device": per_device,
            "mfu": per_device * self.model_flops / self.peak if self.peak else None,
            "hfu": per_device * self.hardware_flops / self.peak if self.peak else None,
        }


def train_rank(job: Job, world: World, folder: Path, attempt: int = 1) -> Summary:
    """Train a resolved job as one rank of `world`; the process group is up when there are several."""
    with ExitStack() as stack:
        stack.enter_context(attention_kernels(world.device))
        built = build(job, world.device)
        progress = load_latest(built, folder) or Progress(step=0, tokens=0)
        corpus = corpus_of(job)
        layout = built.mesh.layout
        loader = stack.enter_context(
            corpus.train_loader(
                global_batch=job.training.global_batch,
                micro_batch=micro_batch(job),
                rank=built.mesh.data_rank,
                ranks=layout.data_ranks,
                start_step=progress.step,
            )
        )
        meter = Meter(job, world.device)
        log = stack.enter_context(MetricsLog(folder, attempt, job)) if world.rank == 0 else None
        display = Display() if world.rank == 0 else None
        if display is not None:
            display.start(job, {"layout": str(layout), "folder": str(folder), "step": progress.step})
        started = time.perf_counter()
        summary = _loop(job, built, corpus, iter(loader), progress, folder, meter, log, display, started)
        if display is not None:
            display.finish(summary)
        return summary


def micro_batch(job: Job) -> int:
    assert job.training.micro_batch is not None, "call fivefold.config.resolve first"
    return job.training.micro_batch


def _loop(
    job: Job,
    built: Built,
    corpus: Corpus,
    batches: Iterator[list[Batch]],
    progress: Progress,
    folder: Path,
    meter: Meter,
    log: MetricsLog | None,
    display: Display | None,
    started: float,
) -> Summary:
    steps = job.training.steps
    tokens = progress.tokens
    loss, val_loss = float("nan"), None
    clock = time.perf_counter()
    for step in range(progress.step + 1, steps + 1):
        lr = learning_rate(job.optimizer, step, steps)
        result = built.step(next(batches), lr, step)
        loss = result.loss
        tokens += meter.tokens_per_step
        now = time.perf_counter()
        seconds, clock = now - clock, now
        record: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": tokens,
            **meter.figures(seconds),
            "memory_gib": peak_memory_gib(built.step.device),
        }
        if built.step.scale is not None:
            record |= {"loss_scale": built.step.scale.value, "skipped": result.skipped}
        if job.training.validate_every and (step % job.training.validate_every == 0 or step == steps):
            val_loss = validate(job, built, corpus)
            record["val_loss"] = val_loss
        if log is not None:
            log.write(record)
        if display is not None:
            display.step(record)
        due = step == steps or (job.checkpoint.every and step % job.checkpoint.every == 0)
        if due and job.checkpoint.keep:
            scale = built.step.scale
            reached = Progress(
                step, tokens, scale.value if scale else None, scale.good_steps if scale else 0
            )
            save(built, folder, reached, job.checkpoint.keep)
        if "val_loss" in record or due:
            clock = time.perf_counter()  # validation and saving are not part of the next step's time
    return Summary(steps, loss, val_loss, tokens, time.perf_counter() - started, str(folder))


@torch.no_grad()
def validate(job: Job, built: Built, corpus: Corpus) -> float:
    """The mean loss per token over the held-out batches: the same ones every time, on any layout."""
    layout = built.mesh.layout
    totals = torch.zeros(2, dtype=torch.float64, device=built.step.device)
    built.model.eval()
    with corpus.heldout_loader(
        global_batch=job.training.global_batch,
        micro_batch=micro_batch(job),
        rank=built.mesh.data_rank,
        ranks=layout.data_ranks,
    ) as loader:
        batches = iter(loader)
        for _ in range(job.training.validate_batches):
            for batch in next(batches):
                moved = batch.to(built.step.device)
                loss = built.model(moved.tokens, moved.targets, moved.documents)
                totals += torch.stack([loss.double(), loss.new_tensor(batch.valid, dtype=torch.float64)])
    built.model.train()
    release_gathered(built)
    if layout.ranks > 1:
        dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def release_gathered(built: Built) -> None:
    """Free weights that a forward without a backward left gathered."""
    if built.weights.sharded:
        from torch.distributed.fsdp import FSDPModule

        for module in built.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
