"""Save a run and take it up again.

A checkpoint is a folder `checkpoints/step-N`: the master weights and optimizer states as
`torch.distributed.checkpoint` writes them, and `progress.json`. It is written under another name and renamed
when it is whole, so a folder called `step-N` is always complete. The data state is the step number.
"""

import json
import math
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from fivefold.problems import BadInput, Problem
from fivefold.training.build import Built

PROGRESS = "progress.json"


@dataclass(frozen=True)
class Progress:
    """How far a run has come, and the losses it last saw: a finished run that is started again tells them."""

    step: int
    tokens: int
    loss_scale: float | None = None
    good_steps: int = 0
    loss: float = math.nan
    val_loss: float | None = None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def _alone() -> Iterator[None]:
    """One process has no process group, and torch need not wonder why."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def saved_steps(run: Path) -> list[int]:
    """Steps of the complete checkpoints of a run, oldest first."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*[0-9]"))


def _state(built: Built) -> dict[str, Any]:
    weights = built.weights
    return {
        "model": {
            name: weights.whole_like(index, master.detach())
            for index, (name, master) in enumerate(zip(weights.names, weights.masters, strict=True))
        },
        "optimizer": built.optimizer.state(),
        **buffers(built),
    }


def buffers(built: Built) -> dict[str, Any]:
    """What a model remembers beside its weights, alike wherever it is: experts' balancing biases."""
    kept = {name for part in built.parts for name in part.state_dict()}
    found = {n: b for part in built.parts for n, b in part.named_buffers() if n in kept}
    return {"buffers": found} if found else {}


def save(built: Built, run: Path, progress: Progress, keep: int) -> Path:
    """Write a checkpoint of this step; every rank calls it. Only the newest `keep` stay."""
    final = run / "checkpoints" / f"step-{progress.step}"
    partial = final.with_name(f"{final.name}.partial")
    if _rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    with _alone():
        save_state(_state(built), checkpoint_id=str(partial), no_dist=not dist.is_initialized())
    if _rank() == 0:
        (partial / PROGRESS).write_text(json.dumps(asdict(progress)))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for step in saved_steps(run)[:-keep]:
            shutil.rmtree(final.with_name(f"step-{step}"))
    _barrier()
    return final


def load_latest(built: Built, run: Path) -> Progress | None:
    """Take up the newest checkpoint of `run`, in place; None when there is none."""
    steps = saved_steps(run)
    if not steps:
        return None
    folder = run / "checkpoints" / f"step-{steps[-1]}"
    state = _state(built)
    _refuse_other_shapes(folder, state)
    with _alone():
        load_state(state, checkpoint_id=str(folder), no_dist=not dist.is_initialized())
    _agree_on_tied(built)
    built.weights.publish()
    progress = Progress(**json.loads((folder / PROGRESS).read_text()))
    if built.step.scale is not None and progress.loss_scale is not None:
        built.step.scale.value = progress.loss_scale
        built.step.scale.good_steps = progress.good_steps
    return progress


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
            for first, loaded in kept:
                first.data.copy_(loaded)


def _refuse_other_shapes(folder: Path, state: dict[str, Any]) -> None:
    """Loading ignores extra names and casts dtypes without a word: compare both sides first."""
    stored = {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in FileSystemReader(str(folder)).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    mine = {
        f"{top}.{name}" if top != "optimizer" else f"{top}.{name}.{kind}": (tuple(tensor.shape), tensor.dtype)
        for top, entries in state.items()
        for name, values in entries.items()
        for kind, tensor in (values.items() if isinstance(values, dict) else [("", values)])
    }
    everyone: list[dict[str, Any]] = [mine]
    if dist.is_initialized():
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
    ours = {name: entry for entries in everyone for name, entry in entries.items()}
    if stored == ours:
        return
    name = next(name for name in sorted(stored.keys() | ours.keys()) if stored.get(name) != ours.get(name))
    raise BadInput(
        [
            Problem(
                "run.folder",
                f"the checkpoint {folder} does not fit this job: '{name}' is "
                f"{stored.get(name, 'absent')} there and {ours.get(name, 'absent')} here",
                "Use another run folder (--run), or the model, optimizer and precision of that run.",
            )
        ]
    )
