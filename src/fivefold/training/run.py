"""One rank's life: build, take up where the run stopped, train, validate, save."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fivefold.axes.layout import described
from fivefold.comm.dead_links import watch_connections
from fivefold.config import Job, dump_toml
from fivefold.data.corpus import Corpus, open_corpus
from fivefold.training.build import build
from fivefold.training.checkpoint import Outcome, Progress, Saver, load_latest
from fivefold.training.meter import Meter
from fivefold.training.metrics import MetricsLog, peak_memory_gib
from fivefold.training.optimizer import learning_rate
from fivefold.training.stopping import StopRequest, listening
from fivefold.training.terminal import Display, duration
from fivefold.training.validation import validate

if TYPE_CHECKING:
    from fivefold.comm.world import World


SAVE, STOP = 1.0, 2.0**20
"""What ranks ask each other for after a step; with up to a million ranks that ask, sums stay apart."""


@dataclass(frozen=True, repr=False)
class Summary:
    """How a run ended; `stopped`: by which signal, before its last step."""

    steps: int
    loss: float
    val_loss: float | None
    tokens: int
    seconds: float
    folder: str
    stopped: str | None = None

    def __repr__(self) -> str:
        held_out = f", held-out {self.val_loss:.4f}" if self.val_loss is not None else ""
        return (
            f"{self.steps} steps, {self.tokens:,} tokens in {duration(self.seconds)}; "
            f"loss {self.loss:.4f}{held_out}; {self.folder}"
        )


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


class TrainingRun:
    """One rank's part of a run, a step at a time. A context manager: leaving it closes files and threads.

    `job` is resolved; the process group is up when the world has several ranks. A run folder with a
    checkpoint is taken up from there.
    """

    def __init__(
        self, job: Job, world: World, folder: Path, attempt: int = 1, stop: StopRequest | None = None
    ):
        self.job = job
        self.stop = stop or StopRequest()
        self.stopped = False
        self.folder = folder
        self.started = time.perf_counter()
        self.built = build(job, world.device)
        progress, damaged = load_latest(self.built, folder)
        self.progress = progress or Progress(step=0, tokens=0)
        self.corpus = corpus_of(job)
        keeping = job.checkpoint
        self.saver = Saver(
            self.built,
            folder,
            keeping.keep,
            keeping.keep_every,
            keeping.async_,
            dump_toml(job),
            self.corpus.fingerprint,
        )
        self.meter = Meter(job, world.device)
        layout = self.built.mesh.layout
        with ExitStack() as stack:
            stack.enter_context(attention_kernels(world.device))
            self.batches = stack.enter_context(
                self.corpus.train_loader(
                    global_batch=job.training.global_batch,
                    micro_batch=self.built.step.micro_batch,
                    rank=self.built.mesh.data_rank,
                    ranks=layout.data_ranks,
                    start_step=self.progress.step,
                )
            )
            self.log = self.display = None
            if world.rank == 0:
                self.log = stack.enter_context(MetricsLog(folder, attempt, job))
                self.display = Display()
                stack.callback(self.display.close)
                for problem in damaged:
                    self.display.say(f"{problem}. An older checkpoint is used.")
                facts = {"layout": described(job), "MFU": self.meter.convention, "folder": folder}
                self.display.start(job, {**facts, "step": self.progress.step})
            self._open = stack.pop_all()
        self._clock = self._saved_at = time.perf_counter()
        self._stalled: float | None = None

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Leave when what was saved is on the disk; after an error at once."""
        try:
            if kind is None:
                self.saver.wait()
        finally:
            self._open.close()

    @property
    def done(self) -> bool:
        return self.stopped or self.progress.step >= self.job.training.steps

    def advance(self) -> dict[str, Any]:
        """Take the next step, with the validation and the checkpoint that are due after it."""
        job, built = self.job, self.built
        step = self.progress.step + 1
        lr = learning_rate(job.optimizer, step, job.training.steps)
        built.step.asks = SAVE * self._wants_to_save() + STOP * (self.stop.signal is not None)
        result = built.step(next(self.batches), lr, step)
        scale = built.step.scale
        self.progress = Progress(
            step,
            self.progress.tokens + self.meter.tokens_per_step,
            scale.value if scale else None,
            scale.good_steps if scale else 0,
            result.loss,
            self.progress.val_loss,
        )
        record: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": self.progress.tokens,
            **self.meter.figures(self._lap()),
            "memory_gib": peak_memory_gib(built.step.device),
            **({} if result.imbalance is None else {"expert_imbalance": result.imbalance}),
        }
        if self._stalled is not None:
            record["checkpoint_stall_s"], self._stalled = self._stalled, None
        if scale is not None:
            record |= {"loss_scale": scale.value, "skipped": result.skipped}
        self.stopped = result.asked >= STOP
        if self._due(job.training.validate_every) and job.training.validate_every and not self.stopped:
            record["val_loss"] = validate(job, built, self.corpus)
            self.progress = replace(self.progress, val_loss=record["val_loss"])
        if self.log is not None:
            self.log.write(record)
        if self.display is not None:
            self.display.step(record)
        if job.checkpoint.keep and (result.asked > 0 or self._due(job.checkpoint.every)):
            self._stalled = self.saver.save(self.progress)
            self._saved_at = self._clock = time.perf_counter()
        self._tell_outcomes()
        self._untimed()
        return record

    def _wants_to_save(self) -> bool:
        """Whether it is time for a checkpoint: by the clock of rank 0."""
        minutes = self.job.checkpoint.minutes if self.job.checkpoint.keep else 0
        return self.display is not None and 0 < minutes * 60 < time.perf_counter() - self._saved_at

    def _tell_outcomes(self) -> None:
        """Say which checkpoints could not be written."""
        outcomes: list[Outcome] = []
        outcomes, self.saver.outcomes = self.saver.outcomes, outcomes
        for outcome in outcomes:
            if outcome.problem is not None and self.display is not None:
                self.display.say(
                    f"the checkpoint of step {outcome.step} was not written: {outcome.problem}. "
                    "Training goes on; those before it are as they were."
                )

    def _due(self, every: int) -> bool:
        """Whether something that happens every `every` steps, and at the end, happens after this one."""
        return self.done or (every > 0 and self.progress.step % every == 0)

    def _lap(self) -> float:
        """Seconds since the last step's end, or since what came after it and is not training."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return seconds

    def _untimed(self) -> None:
        if self._due(self.job.training.validate_every) or self._due(self.job.checkpoint.every):
            self._clock = time.perf_counter()

    def finish(self) -> Summary:
        """Say how the run ended, when its last checkpoint is on the disk."""
        self.saver.wait()
        self._tell_outcomes()
        seconds = time.perf_counter() - self.started
        reached = self.progress
        early = self.stopped and reached.step < self.job.training.steps
        stopped = (self.stop.signal.name if self.stop.signal else "another rank") if early else None
        summary = Summary(
            reached.step, reached.loss, reached.val_loss, reached.tokens, seconds, str(self.folder), stopped
        )
        if self.display is not None:
            self.display.finish(summary)
        return summary


def train_rank(job: Job, world: World, folder: Path, attempt: int = 1) -> Summary:
    """Train a job to its last step, as one rank of `world`."""
    with listening() as stop, TrainingRun(job, world, folder, attempt, stop) as run:
        watch_connections()
        while not run.done:
            run.advance()
        return run.finish()
