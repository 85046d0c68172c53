"""One rank's life: build, take up where the run stopped, train, validate, save."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fivefold.axes.fp8 import told
from fivefold.axes.layout import described
from fivefold.comm.dead_links import watch_connections
from fivefold.config import Job, dump_toml
from fivefold.data.corpus import Corpus, open_corpus
from fivefold.ledger.setup import Setup
from fivefold.storage.folder import saved_steps
from fivefold.training.build import build
from fivefold.training.checkpoint import Outcome, Progress, Saver, load_latest
from fivefold.training.deterministic import fixed_order
from fivefold.training.facts import sizes
from fivefold.training.failures import NonFiniteError
from fivefold.training.learning_rate import learning_rate
from fivefold.training.meter import Meter
from fivefold.training.metrics import MetricsLog, peak_memory_gib
from fivefold.training.non_finite import NOT_TAKEN, rolled_back, skips_after
from fivefold.training.profile import cleared, profiled_steps, write_profile
from fivefold.training.recorder import Recorder
from fivefold.training.samples import SampleLog, digest
from fivefold.training.start import without_weights
from fivefold.training.stopping import SAVE, STOP, STOPPING_S, StopRequest, listening
from fivefold.training.terminal import Display, duration
from fivefold.training.validation import validate
from fivefold.training.watching import groups_of, heartbeat
from fivefold.watch.heartbeat import Heartbeat

if TYPE_CHECKING:
    from fivefold.comm.world import World
    from fivefold.data.loader import Loader


@dataclass(frozen=True, repr=False)
class Summary:
    """How a run ended; `stopped`: by which signal, before its last step; `profile`: the summary of one."""

    steps: int
    loss: float
    val_loss: float | None
    tokens: int
    seconds: float
    folder: str
    stopped: str | None = None
    profile: str | None = None

    def __repr__(self) -> str:
        held_out = f", held-out {self.val_loss:.4f}" if self.val_loss is not None else ""
        return (
            f"{self.steps} steps, {self.tokens:,} tokens in {duration(self.seconds)}; "
            f"loss {self.loss:.4f}{held_out}; {self.folder}"
        )


def corpus_of(job: Job, progress: bool = False) -> Corpus:
    """Open (and tokenise, the first time) the job's data.

    progress  before ranks start: show how far it is, and compare what is cached with its checksums
    """
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
        closely=progress,
    )


def attention_kernels(device: torch.device, deterministic: bool = False) -> AbstractContextManager[Any]:
    """Prefer the fastest attention kernel there is: cuDNN's on recent GPUs; on a CPU there is no choice.

    deterministic  without cuDNN's, whose backward pass adds in any order
    """
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order[deterministic:], set_priority=True)


class TrainingRun:
    """One rank's part of a run, a step at a time. A context manager: leaving it closes files and threads.

    `job` is resolved; the process group is up when the world has several ranks. A run folder with a
    checkpoint is taken up from there. With `profile` some steps are recorded (`training/profile.py`).
    """

    def __init__(
        self,
        job: Job,
        world: World,
        folder: Path,
        attempt: int = 1,
        stop: StopRequest | None = None,
        beat: Heartbeat | None = None,
        profile: bool = False,
    ):
        self.job = job
        self.stop = stop or StopRequest()
        self.stopped = False
        self.folder = folder
        self.started = time.perf_counter()
        self.beat = beat or Heartbeat(folder, world.rank, world.size)
        self.beat.tell("build")
        self.built = build(without_weights(job) if saved_steps(folder) else job, world.device)
        self.beat.watch(groups_of(self.built.mesh))
        progress, damaged = load_latest(self.built, folder)
        self.progress = progress or Progress(step=0, tokens=0)
        wanted = profiled_steps(self.progress.step, job.training.steps) if profile else range(0)
        self.recorder = Recorder(wanted, world.device)
        self.built.step.tell = self.recorder.telling(self.beat.tell) if profile else self.beat.tell
        self.profile: Path | None = None
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
        self.rollbacks = 0
        with ExitStack() as stack:
            stack.callback(self.recorder.close)
            stack.enter_context(attention_kernels(world.device, job.training.deterministic))
            self.batches = stack.enter_context(self._batches())
            self.log = self.display = self.samples = None
            if world.rank == 0:
                self.samples = SampleLog(folder, attempt)
                stack.callback(self.samples.file.close)
                self.log = stack.enter_context(MetricsLog(folder, attempt, job))
                self.display = Display()
                stack.callback(self.display.close)
                for problem in damaged:
                    self.display.say(f"{problem}. An older checkpoint is used.")
                facts = {"layout": described(job), "MFU": self.meter.convention, "folder": folder}
                if (offloaded := self.built.optimizer.offloaded) is not None:
                    facts["optimizer states"] = f"{offloaded.host_bytes / 2**30:.2f} GiB in host memory"
                if job.training.fp8 != "none":
                    self.display.say(f"fp8 {told(Setup.of(job))}")
                self.display.start(job, {**facts, "step": self.progress.step}, sizes(job, self.corpus))
                if profile:
                    cleared(folder)
                    if not wanted:
                        self.display.say("not profiled: too few steps are left.")
            self._open = stack.pop_all()
        self._clock = self._saved_at = time.perf_counter()
        self._stalled: float | None = None
        if progress is None and job.resilience.non_finite == "rollback":
            self.saver.save(self.progress)  # there is always one to go back to

    def _batches(self) -> Loader:
        """This rank's micro-batches from where the run stands."""
        return self.corpus.train_loader(
            global_batch=self.job.training.global_batch,
            micro_batch=self.built.step.micro_batch,
            rank=self.built.mesh.data_rank,
            ranks=self.built.mesh.layout.data_ranks,
            start_step=self.progress.step,
            shares=self.built.shares,
        )

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
        self.beat.begin(step)
        self.recorder.begin(step)
        lr = learning_rate(job.optimizer, step, job.training.steps)
        built.step.asks = SAVE * self._wants_to_save() + STOP * (self.stop.signal is not None)
        batches = next(self.batches)
        built.step.samples = digest(batches) if built.mesh.place.speaks_for_sequences else 0
        try:
            result = NOT_TAKEN if step in self.progress.left_out else built.step(batches, lr, step)
        except NonFiniteError as error:
            self._roll_back(error)
            return self.advance()
        scale = built.step.scale
        self.progress = Progress(
            step,
            self.progress.tokens + self.meter.tokens_per_step,
            scale.value if scale else None,
            scale.good_steps if scale else 0,
            self.progress.loss if result.skipped else result.loss,
            self.progress.val_loss,
            skips_after(self.progress.skips, result, step),
            self.progress.left_out,
        )
        self.recorder.end(step, pauses=result.asked > 0 or self._pauses, over=result.asked >= STOP)
        record: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": self.progress.tokens,
            **self.meter.figures(self._lap()),
            "memory_gib": peak_memory_gib(built.step.device),
            **({} if result.imbalance is None else {"expert_imbalance": result.imbalance}),
            **({} if result.outer is None else asdict(result.outer)),
        }
        if self._stalled is not None:
            record["checkpoint_stall_s"], self._stalled = self._stalled, None
        if scale is not None:
            record["loss_scale"] = scale.value
        if scale is not None or result.skipped:
            record["skipped"] = result.skipped
        if result.problem is not None and self.display is not None:
            self.display.say(f"{result.problem} Its update is skipped ({self.progress.skips} in a row).")
        if self.samples is not None:
            taken = None if result is NOT_TAKEN else result.samples
            self.samples.write(step, batches[0].first, job.training.global_batch, taken)
        self.stopped = result.asked >= STOP
        if self._due(job.training.validate_every) and job.training.validate_every and not self.stopped:
            built.step.before_all_meet(step)
            held_out = validate(job, built, self.corpus, lambda: self.stop.signal is not None)
            self.stopped = held_out is None
            if held_out is not None:
                record["val_loss"] = held_out
                self.progress = replace(self.progress, val_loss=held_out)
        if self.stopped:
            self.stop.cancel()  # the limit is for coming here, not for writing the checkpoint
        if self.log is not None:
            self.log.write(record)
        if self.display is not None:
            self.display.step(record)
        if job.checkpoint.keep and (result.asked > 0 or self._due(job.checkpoint.every)):
            if self.samples is not None:
                self.samples.file.sync()  # what a checkpoint was trained on is on the disk before it
            self.beat.tell("checkpoint")
            built.step.before_all_meet(step)
            self._stalled = self.saver.save(self.progress)
            self._saved_at = self._clock = time.perf_counter()
        self._tell_outcomes()
        self._write_profile()
        self._untimed()
        return record

    def _write_profile(self) -> None:
        """Write what was recorded behind its last step, or say why there is nothing."""
        recorder = self.recorder
        if recorder.problem is not None and self.display is not None:
            self.display.say(f"not profiled: {recorder.problem}.")
        recorder.problem = None
        if recorder.finished:
            self.beat.tell("profile")
            self.profile = write_profile(
                recorder, self.job, self.built.mesh, self.beat.rank, self.folder, self.display
            )
            self._clock = time.perf_counter()

    def _roll_back(self, error: NonFiniteError) -> None:
        """Go back to the last checkpoint, to leave this step out; raises the error where it must not."""
        resilience = self.job.resilience
        if resilience.non_finite != "rollback" or self.rollbacks == resilience.restarts:
            raise error
        found = rolled_back(self.built, self.saver, self.folder, self.progress, error.step)
        if found is None:
            raise error
        self.progress, self.rollbacks = found, self.rollbacks + 1
        if self.recorder.recording:
            self.recorder.give_up("the run went back to a checkpoint meanwhile")
        self.batches.close()
        self.batches = self._open.enter_context(self._batches())
        self._clock = time.perf_counter()
        if self.display is not None:
            self.display.say(
                f"{error.problem} Going back to step {found.step}, to leave step {error.step} out; "
                f"rollbacks left: {resilience.restarts - self.rollbacks}."
            )

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

    @property
    def _pauses(self) -> bool:
        """Whether something that is no step follows this one."""
        return self._due(self.job.training.validate_every) or self._due(self.job.checkpoint.every)

    def _untimed(self) -> None:
        if self._pauses:
            self._clock = time.perf_counter()

    def finish(self) -> Summary:
        """Say how the run ended, when its last checkpoint is on the disk."""
        self.beat.tell("checkpoint")
        self.saver.wait()
        self._tell_outcomes()
        seconds = time.perf_counter() - self.started
        reached = self.progress
        early = self.stopped and reached.step < self.job.training.steps
        stopped = (self.stop.signal.name if self.stop.signal else "another rank") if early else None
        summary = Summary(
            *(reached.step, reached.loss, reached.val_loss, reached.tokens, seconds, str(self.folder)),
            stopped=stopped,
            profile=None if self.profile is None else str(self.profile),
        )
        if self.display is not None:
            self.display.finish(summary)
        return summary


def train_rank(job: Job, world: World, folder: Path, attempt: int = 1, profile: bool = False) -> Summary:
    """Train a job to its last step, as one rank of `world`; `profile`: record some of its steps."""
    with (
        fixed_order(job),
        listening(limit=STOPPING_S) as stop,
        heartbeat(job, world, folder) as beat,
        TrainingRun(job, world, folder, attempt, stop, beat, profile) as run,
    ):
        watch_connections()
        while not run.done:
            run.advance()
        return run.finish()
