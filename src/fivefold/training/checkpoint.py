"""Save a run and take it up again.

Training waits only while its state is copied out of the device; then a thread of each rank writes its file
and says so in the folder, and rank 0's commits the checkpoint when all have. No message is sent for it, so
that it cannot get in the way of training's. What lies on the disk, and when it counts: `storage/`.
"""

import errno
import math
import shutil
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from fivefold.config import Job
from fivefold.problems import BadInput, Problem, refuse
from fivefold.storage.folder import begin, commit, damage, newest_first, partial_of, prune
from fivefold.storage.manifest import DamagedError, Manifest, OtherFormatError, read_manifest
from fivefold.storage.tensors import (
    DTYPES,
    PiecesReader,
    PiecesWriter,
    Staging,
    gathered_parts,
    leave_part,
)
from fivefold.training import replica_state, residuals
from fivefold.training.build import Built
from fivefold.training.misfit import other_format, other_tensors
from fivefold.version import __version__

RESIDUAL = f"{residuals.STATE}."


@dataclass(frozen=True)
class Progress:
    """How far a run has come, and the losses it last saw: a finished run that is started again tells them.

    skips     how many updates in a row were skipped up to this step, since numbers were not finite
    left_out  steps that are not taken, since numbers were not finite there and the run was rolled back
    """

    step: int
    tokens: int
    loss_scale: float | None = None
    good_steps: int = 0
    loss: float = math.nan
    val_loss: float | None = None
    skips: int = 0
    left_out: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """How writing a checkpoint ended: its bytes and seconds, or why there is none."""

    step: int
    bytes: int
    seconds: float
    problem: str | None = None


@dataclass
class Saver:
    """Writes the checkpoints of a run; every rank has one.

    keep        how many stay on the disk, and `keep_every`: of which steps they always do
    background  write while training goes on
    job, data   what is written down with it: the job as TOML, and a fingerprint of each source
    outcomes    on rank 0: of those that were written, or could not be, since somebody last looked
    """

    built: Built
    run: Path
    keep: int
    keep_every: int = 0
    background: bool = True
    job: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._written = threading.Event()
        self._error: BaseException | None = None

    def save(self, progress: Progress) -> float:
        """Save this step; every rank calls it. Returns the seconds that training waited.

        One that is still being written is waited for.
        """
        started = time.perf_counter()
        self.wait()
        if not self._begun(progress):
            return time.perf_counter() - started
        writer = PiecesWriter(_rank(), self._staging, changes=self.background)
        with _alone():
            save_state(_to_save(self.built), storage_writer=writer, no_dist=not dist.is_initialized())
        self._written.clear()
        self._thread = threading.Thread(target=self._write, args=(writer, progress), name="checkpoint")
        self._thread.start()
        if not self.background:
            self._written.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Until what was saved is on the disk, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _begun(self, progress: Progress) -> bool:
        """Make the folder to write into; whether rank 0 could."""
        problem: list[str | None] = [None]
        if _rank() == 0:
            try:
                begin(self.run, progress.step)
            except OSError as error:
                problem[0] = f"{error.filename or self.run}: {error.strerror}"
                self.outcomes.append(Outcome(progress.step, 0, 0.0, problem[0]))
        if dist.is_initialized():
            dist.broadcast_object_list(problem, src=0)
        return problem[0] is None

    def _write(self, writer: PiecesWriter, progress: Progress) -> None:
        """In a thread: this rank's file; and on rank 0, what makes a checkpoint of all of them."""
        try:
            started = time.perf_counter()
            folder, rank = partial_of(self.run, progress.step), _rank()
            try:
                leave_part(folder, rank, {writer.name: writer.write(folder)})
            except OSError as error:
                needed = len(writer.beginning) + sum(t.nbytes for t in writer.staged.values())
                free = shutil.disk_usage(self.run).free
                (folder / writer.name).unlink(missing_ok=True)
                leave_part(folder, rank, {}, _told(error, needed, free))
            if rank == 0:
                self._commit(folder, writer, progress, started)
        except BaseException as error:
            self._error = error
        finally:
            self._written.set()

    def _commit(self, folder: Path, writer: PiecesWriter, progress: Progress, started: float) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        files, problems = gathered_parts(folder, ranks)
        size = sum(file.bytes for file in files.values())
        if not problems:
            manifest = Manifest(
                step=progress.step,
                versions={"fivefold": __version__, "torch": torch.__version__},
                job=self.job,
                data=dict(self.data),
                progress=asdict(progress),
                tensors=writer.tensors,
                files=files,
            )
            try:
                commit(self.run, manifest)
                self._written.set()  # removing older ones takes a while, and nobody waits for it
                prune(self.run, self.keep, self.keep_every)
            except OSError as error:
                problems = [_told(error, size, shutil.disk_usage(self.run).free)]
        if problems:
            shutil.rmtree(folder, ignore_errors=True)
        seconds = time.perf_counter() - started
        self.outcomes.append(Outcome(progress.step, size, seconds, problems[0] if problems else None))


def _told(error: OSError, needed: int, free: int) -> str:
    """Why something could not be written, in words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full: {needed:,} bytes are needed for this rank's part, and {free:,} are there"
    return f"{error.strerror}: {error.filename}"


def load_latest(built: Built, run: Path) -> tuple[Progress | None, list[str]]:
    """Take up the newest checkpoint of `run` that is whole, in place; None when there is none at all.

    And what is wrong with those that were passed over. Raises `BadInput` where all are damaged, or the newest
    that is not does not fit this job.
    """
    damaged: list[str] = []
    for folder in newest_first(run):
        manifest, problems = _checked(folder)
        if manifest is None or problems:
            damaged.append(f"{folder} is damaged: {'; '.join(problems)}")
            continue
        state = _to_load(built, manifest)
        _refuse_other_shapes(folder, manifest, state, built.job)
        with _alone():
            reader = PiecesReader(folder, manifest)
            load_state(state, storage_reader=reader, no_dist=not dist.is_initialized())
        _load_residuals(built, folder, manifest)
        _agree_on_tied(built)
        if manifest.only_weights:
            built.optimizer.restart_average()
        if built.outer is not None and not replica_state.has_outer(manifest.tensors):
            built.outer.begin()
        built.weights.publish()
        progress = Progress(**manifest.progress)
        if built.step.scale is not None and progress.loss_scale is not None:
            built.step.scale.value = progress.loss_scale
            built.step.scale.good_steps = progress.good_steps
            replica_state.take_scale(state, built.step.scale)
        return progress, damaged
    if damaged:
        hint = "Bring a copy of one back, or name another folder with --run."
        raise BadInput([Problem("run.folder", problem, hint) for problem in damaged])
    return None, []


def _load_residuals(built: Built, folder: Path, manifest: Manifest) -> None:
    """What error feedback had kept. Who keeps what may be another matter now, so each rank reads its own."""
    mine = built.step.residuals
    ours = {name for each in _everyone(list(mine.kept)) for name in each}
    stored = [name.removeprefix(RESIDUAL) for name in manifest.tensors if name.startswith(RESIDUAL)]

    def read(tensors: Mapping[str, torch.Tensor]) -> None:
        with _alone():
            reader = PiecesReader(folder, manifest)
            load_state({residuals.STATE: dict(tensors)}, storage_reader=reader, no_dist=True)

    mine.load(stored, ours, read)


def _checked(folder: Path) -> tuple[Manifest | None, list[str]]:
    """A checkpoint's manifest, and what is wrong with it. Ranks check its files between them."""
    manifest, mine = None, list[str]()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    try:
        manifest = read_manifest(folder)
        names = sorted(manifest.files)[_rank() :: ranks]
        mine = [wrong for name in names if (wrong := damage(folder / name, manifest.files[name]))]
    except OtherFormatError as error:
        raise BadInput([other_format(folder, error)]) from None
    except DamagedError as error:
        mine = [str(error)]
    return manifest, list(dict.fromkeys(wrong for each in _everyone(mine) for wrong in each))


def _everyone(mine: Any) -> list[Any]:
    """What each rank has."""
    if not dist.is_initialized():
        return [mine]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def _alone() -> Iterator[None]:
    """One process has no process group, and torch need not wonder why."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _state(built: Built) -> dict[str, Any]:
    weights = built.weights
    return {
        "model": {
            name: weights.whole_like(index, master.detach())
            for index, (name, master) in enumerate(zip(weights.names, weights.masters, strict=True))
        },
        "optimizer": built.optimizer.state(),
        **({residuals.STATE: kept} if (kept := built.step.residuals.state()) else {}),
        **buffers(built),
    }


def _to_save(built: Built) -> dict[str, Any]:
    """What this rank writes, by name."""
    own, replica = _state(built), built.mesh.place.dp_replicate
    return own if built.outer is None else replica_state.to_save(own, built.outer, replica, built.step.scale)


def _to_load(built: Built, manifest: Manifest) -> dict[str, Any]:
    """What this rank takes up of a checkpoint, by the names that it has there."""
    own, names = _state(built), manifest.tensors
    own.pop(residuals.STATE, None)  # who keeps what may be another matter now
    if manifest.only_weights:
        return {"model": own["model"]}
    if built.outer is not None:
        return replica_state.to_load(own, built.outer, built.mesh.place.dp_replicate, names)
    return replica_state.without_replicas(own) if replica_state.has_outer(names) else own


def buffers(built: Built) -> dict[str, Any]:
    """What a model remembers beside its weights, alike wherever it is: experts' balancing biases."""
    kept = {name for part in built.parts for name in part.state_dict()}
    found = {n: b for part in built.parts for n, b in part.named_buffers() if n in kept}
    return {"buffers": found} if found else {}


def _agree_on_tied(built: Built) -> None:
    """A tied embedding that two stages of one rank use is one entry of the checkpoint, but two here."""
    names = built.weights.names
    for index, name in enumerate(names):
        last = len(names) - 1 - names[::-1].index(name)
        if last != index:
            kept = [
                *zip(built.optimizer.tensors_of(index), built.optimizer.tensors_of(last), strict=True),
                (built.weights.masters[index], built.weights.masters[last]),
            ]
            if built.outer is not None:
                kept += zip(built.outer.tensors_of(index), built.outer.tensors_of(last), strict=True)
            for first, loaded in kept:
                first.data.copy_(loaded)


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state by their names in a checkpoint."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _refuse_other_shapes(folder: Path, manifest: Manifest, state: dict[str, Any], job: Job) -> None:
    """Loading ignores extra names and casts dtypes without a word: compare both sides first.

    Weights alone, which no run has trained yet, may come in any dtype.
    """
    stored = {
        name: (tuple(tensor.shape), DTYPES[tensor.dtype])
        for name, tensor in manifest.tensors.items()
        if not name.startswith(RESIDUAL) and not replica_state.left_out(name, job, manifest.tensors)
    }
    mine = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in _flat(state)}
    if manifest.only_weights:
        _, masters = next(iter(mine.values()))
        stored = {name: (shape, masters) for name, (shape, _) in stored.items()}
    ours = {name: entry for entries in _everyone(mine) for name, entry in entries.items()}
    refuse(other_tensors(folder, stored, ours, manifest.job, job))
