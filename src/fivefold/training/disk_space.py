"""Whether the disk has room for a run's checkpoints, told before it starts."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.axes.matrices import is_matrix
from fivefold.ledger.setup import Setup
from fivefold.models.inventory import parameters
from fivefold.storage.folder import newest_first
from fivefold.storage.manifest import DamagedError, read_manifest
from fivefold.training.preflight import gib

if TYPE_CHECKING:
    from fivefold.config import Job


def checkpoint_bytes(job: Job) -> int:
    """Bytes of one checkpoint of a resolved job: master weights and what the optimizer keeps, each once.

    It does not depend on the layout, but with outer steps there is one of each replica. Buffers and the
    manifest are small beside it, and not counted.
    """
    setup, every = Setup.of(job), parameters(job.spec)
    count = sum(parameter.count for parameter in every)
    matrices = [each.count for each in every if is_matrix(job.spec, each.name, each.shape)]
    moments = setup.moment_bytes(count, sum(matrices)) + setup.counter_bytes(len(every), len(matrices))
    replicas = int(setup.dp_replicate) if setup.outer_steps else 1
    return int(replicas * (count * setup.precision.master_bytes + moments) + setup.outer_bytes(count))


def disk_warning(job: Job, folder: Path) -> str | None:
    """What to tell where the disk has no room for the checkpoints that are kept; None where it has.

    One more is written before the oldest is removed. What this run has saved before makes room in time.
    """
    keeping, steps = job.checkpoint, job.training.steps
    if not keeping.keep:
        return None
    always = steps // keeping.keep_every if keeping.keep_every else 0
    most = min(keeping.keep + 1 + always, steps)
    size, free = checkpoint_bytes(job), shutil.disk_usage(folder).free + _saved(folder)
    if most * size <= free:
        return None
    kept = f"checkpoint.keep = {keeping.keep}"
    kept += f" and checkpoint.keep_every = {keeping.keep_every}" if always else ""
    return (
        f"disk: {kept} needs {gib(most * size)} GiB ({most} checkpoints of {gib(size)} GiB: one is written "
        f"before the oldest goes), and {gib(free)} GiB are free in {folder}"
    )


def _saved(folder: Path) -> int:
    """Bytes of the checkpoints that are there already."""
    total = 0
    for checkpoint in newest_first(folder):
        with suppress(DamagedError):
            total += read_manifest(checkpoint).size
    return total
