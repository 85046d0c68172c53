"""The verb `train`: everything that can be refused is refused, then the ranks start.

On its own it starts one process per rank. Inside torchrun or srun it is one of the ranks already, and joins.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from fivefold.axes.checks import check
from fivefold.comm.world import (
    DeviceKind,
    World,
    device_kind,
    joined,
    launch_id,
    launch_warning,
    launched_world,
    restarted,
    too_many,
)
from fivefold.config import Job, with_own_model
from fivefold.config.resolve import ranks_given
from fivefold.config.run_folder import named_folder, new_folder, ranks_before, ranks_had
from fivefold.interchange.tokenizer import keep_tokenizer
from fivefold.problems import BadInput, BadNews, Problem, refuse
from fivefold.storage.folder import being_written, saved_steps
from fivefold.storage.lock import in_use, locked
from fivefold.training.disk_space import disk_warning
from fivefold.training.elastic import devices_left, most_ranks, planned_for
from fivefold.training.failures import NonFiniteError, RanksFailed
from fivefold.training.job_files import keep_jobs
from fivefold.training.last_words import last_words
from fivefold.training.lost_peers import ending_promptly
from fivefold.training.metrics import check_loggers, next_attempt
from fivefold.training.preflight import (
    device_problems,
    fp8_problems,
    host_problems,
    memory_problems,
    memory_warning,
)
from fivefold.training.profile import cleared, profile_problems
from fivefold.training.promise import keep, sentence
from fivefold.training.ranks import recorded, run_ranks, stop_if_imported
from fivefold.training.replica_state import replicas_note
from fivefold.training.resume import check_resume
from fivefold.training.run import Summary, corpus_of, train_rank
from fivefold.training.shared_folder import check_shared
from fivefold.training.start import check_weights, keep_start, say_unheeded
from fivefold.training.stopping import leaving
from fivefold.training.watching import watcher
from fivefold.watch.beat import clear

__all__ = ["RanksFailed", "Start", "prepare", "rank_count", "run_ranks", "train"]


@dataclass(frozen=True)
class Start:
    """What every rank is given: a resolved job, the run's folder, and which attempt at the run this is.

    force    start although memory is too small, or was looked at before
    profile  record some steps
    """

    job: Job
    folder: Path
    attempt: int
    force: bool = False
    profile: bool = False

    @property
    def errors(self) -> Path:
        return self.folder / "errors"

    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return being_written(self.folder)


def train(
    job: Job,
    nproc: int | None = None,
    run: str | Path | None = None,
    model: Callable[[], torch.nn.Module] | None = None,
    force: bool = False,
    profile: bool = False,
) -> Summary:
    """Train a job, resolved or not. Raises `BadInput`, or `RanksFailed` when a rank failed.

    nproc  how many ranks; left out, as many as the run had, else what the layout says, else one per GPU,
           else one
    run    the run's folder; left out, what the job says, else a new one in `runs/`. A folder that holds
           a checkpoint is continued.
    model  a model of your own, by its class: short for `model.module`
    force  start although the job does not fit into memory, by the planner's figure
    profile  record the tenth to twelfth step: where the time went, by kind (docs/profile.md)

    Ranks are processes that import the calling script: guard what it does by `if __name__ == "__main__"`.
    """
    stop_if_imported()
    job = with_own_model(job, model)
    world = launched_world()
    if world is not None:
        return _train_joined(job, world, nproc, run, force, profile)
    kind = device_kind()
    nproc = ranks_before(named_folder(job, run), job) if nproc is None else nproc
    ranks = rank_count(job, nproc, kind)
    with leaving(), ExitStack() as held:
        return _supervised(job, prepare(job, ranks, kind, run, held, force, profile), ranks, kind)


def _supervised(asked: Job, start: Start, ranks: int, kind: DeviceKind) -> Summary:
    """Train; ranks that fail are started again from the last checkpoint, as often as the job allows.

    Not where numbers went wrong, nor where a rank raises the same error twice with no checkpoint between: it
    would raise it again. An elastic job goes on with fewer ranks where GPUs are gone, or a rank dies twice
    with no checkpoint between.
    """
    last: tuple[object, ...] = ()
    for left in reversed(range(start.job.resilience.restarts + 1)):
        try:
            with last_words(start.folder, start.attempt):
                return run_ranks(
                    *(_train, ranks, start),
                    device=kind,
                    errors=start.errors,
                    stoppable=True,
                    busy=start.saving,
                    watch=watcher(start.folder, ranks, start.job.resilience.join_s),
                )[0]
        except RanksFailed as failed:
            first, saved = failed.failures[0], saved_steps(start.folder)
            again = (first.type, first.message, saved)
            if left == 0 or first.type == NonFiniteError.__name__ or (not first.is_death and again == last):
                raise
            died_again, last = again == last, again
            where = f"step {saved[-1]}" if saved else "the beginning"
            print(
                f"rank {first.rank} failed: {first.type}: {first.message.splitlines()[0]}. "
                f"Starting again from {where}; restarts left: {left - 1}.",
                file=sys.stderr,
            )
            clear(start.folder)
            attempt = max(start.attempt + 1, next_attempt(start.folder))
            start = replace(start, attempt=attempt, force=True)
            if asked.resilience.elastic and 0 < (there := devices_left(ranks, kind) - died_again) < ranks:
                ranks = most_ranks(asked, there, kind)
                print(f"Going on with {ranks} ranks.", file=sys.stderr)
                again_with = prepare(asked, ranks, kind, start.folder, force=True)
                start = replace(again_with, attempt=attempt, profile=start.profile)
    raise AssertionError("the last attempt returns or raises")


def rank_count(job: Job, nproc: int | None, kind: DeviceKind) -> int:
    """How many ranks to start on this machine. Raises `BadInput` when it has fewer GPUs."""
    if nproc is not None and not (isinstance(nproc, int) and nproc >= 1):
        raise BadInput([Problem("--nproc", f"{nproc} is out of range", "Allowed: an integer, at least 1.")])
    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    ranks = nproc or ranks_given(job.layout) or gpus or 1
    if gpus and ranks > gpus:
        key = "--nproc" if nproc else "layout"
        hint = (
            f"A rank takes one GPU: use {gpus} ranks or fewer, start more machines with torchrun or srun, "
            "or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU."
        )
        raise BadInput([Problem(key, f"{ranks} ranks, but this machine has {gpus} GPUs", hint)])
    if kind == "cpu":
        refuse(too_many(ranks, "--nproc" if nproc else "layout"))
    return ranks


def prepare(
    job: Job,
    ranks: int,
    kind: DeviceKind,
    run: str | Path | None,
    held: ExitStack | None = None,
    force: bool = False,
    profile: bool = False,
) -> Start:
    """Plan, refuse what can be refused, tokenise the data, make the run's folder. Raises `BadInput`.

    The folder then holds `job.toml`: the job with nothing left open, and `asked.toml`: the job as it was
    given. It is locked until `held` is left.
    """
    say_unheeded(job)
    asked, named = job, named_folder(job, run)
    before = ranks_had(named) if named is not None else None
    job, promise = planned_for(job, ranks, kind, before, restarted())
    refuse([*check(job), *fp8_problems(job, kind), *check_loggers(job.run), *check_weights(job, named)])
    refuse([] if force else [*memory_problems(job, kind), *host_problems(job, kind)])
    if profile:
        done = max(saved_steps(named), default=0) if named is not None else 0
        refuse(profile_problems(done, job.training.steps))
    corpus = corpus_of(job, progress=True)
    if job.training.validate_every:
        corpus.heldout_loader(job.training.global_batch, job.training.micro_batch or 1).close()
    folder = _make_folder(job, run)
    if held is not None:
        held.enter_context(locked(folder, launch_id()))
    refuse(check_resume(folder, job, corpus.fingerprint))
    job = job.model_copy(
        update={
            "run": job.run.model_copy(update={"name": job.run.name or folder.name, "folder": str(folder)})
        }
    )
    if profile:
        cleared(folder)
    keep_jobs(folder, asked, job)
    keep_start(job, folder)
    keep_tokenizer(job.data.tokenizer, corpus.tokenizer, folder)
    if promise is not None:
        keep(promise, folder)
        print(sentence(promise), file=sys.stderr)
    notes = memory_warning(job, kind), disk_warning(job, folder), replicas_note(job, folder)
    for note in filter(None, notes):
        print(note, file=sys.stderr)
    clear(folder)
    start = Start(job, folder, next_attempt(folder), force, profile)
    for stale in start.errors.glob("rank-*.json"):
        stale.unlink()
    return start


def _train(world: World, start: Start) -> Summary:
    refuse([] if start.force else device_problems(start.job, world.device))
    with in_use(start.folder):
        return train_rank(start.job, world, start.folder, start.attempt, start.profile)


def _train_joined(
    job: Job,
    world: World,
    nproc: int | None,
    run: str | Path | None,
    force: bool = False,
    profile: bool = False,
) -> Summary:
    """Train as one of the ranks that torchrun or srun started. Rank 0 prepares for all."""
    if nproc is not None and nproc != world.size:
        hint = "Leave --nproc out: the launcher says how many."
        raise BadInput(
            [Problem("--nproc", f"{nproc}, but {world.launched} started {world.size} ranks", hint)]
        )
    if world.device.type == "cuda" and world.local_rank >= torch.cuda.device_count():
        message = f"more ranks on one machine than its {torch.cuda.device_count()} GPUs"
        raise BadInput([Problem(world.launched, message, "Start one rank per GPU.")])
    if world.rank == 0 and (warning := launch_warning()):
        print(warning, file=sys.stderr)
    joining = joined(world, join_s=job.resilience.join_s)
    with leaving(), ExitStack() as held, joining, ending_promptly(world):
        start = _agreed_start(job, world, run, held, force, profile)
        if world.size > 1 and (unseen := check_shared(start.folder, world.rank)):
            raise BadInput(unseen) if world.rank == 0 else SystemExit(2)
        said = last_words(start.folder, start.attempt) if world.rank == 0 else nullcontext()
        with said, recorded(world, start.errors):
            return _train(world, start)


def _agreed_start(
    job: Job, world: World, run: str | Path | None, held: ExitStack, force: bool, profile: bool
) -> Start:
    """What rank 0 prepared, on every rank. Bad input is raised on rank 0 alone: once is enough to read it."""
    outcome: list[Start | BadInput | BadNews | None] = [None]
    if world.rank == 0:
        try:
            kind: DeviceKind = "cuda" if world.device.type == "cuda" else "cpu"
            outcome[0] = prepare(job, world.size, kind, run, held, force, profile)
        except (BadInput, BadNews) as error:
            outcome[0] = error
    if world.size > 1:
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Start):
        return outcome[0]
    if world.rank == 0 and outcome[0] is not None:
        raise outcome[0]
    raise SystemExit(1 if isinstance(outcome[0], BadNews) else 2)


def _make_folder(job: Job, run: str | Path | None) -> Path:
    """The run's folder: the one that was named, or a new one named after the model and the time."""
    named = named_folder(job, run)
    folder = named or new_folder(job)
    try:
        folder.mkdir(parents=True, exist_ok=named is not None)
    except OSError as error:
        hint = "Name another folder with --run."
        raise BadInput(
            [Problem("run.folder", f"'{folder}' cannot be made: {error.strerror}", hint)]
        ) from None
    return folder.resolve()
