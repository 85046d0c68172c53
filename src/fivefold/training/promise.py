"""What the planner promises of a run before it starts, kept in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from fivefold.config import Job, resolve

if TYPE_CHECKING:
    from fivefold.planner.search.planned import Planned

FILE = "planned.json"


def planned(job: Job, ranks: int, kind: Literal["cuda", "cpu"]) -> tuple[Job, Planned | None]:
    """The job resolved, with the layout that the planner chose under `layout.auto`.

    The planner's figures come with it where it was asked to choose, or where the job names a cluster.
    """
    if not job.layout.auto and job.cluster.preset is None and job.cluster.file is None:
        return resolve(job, ranks, kind), None
    from fivefold.ledger.setup import Setup
    from fivefold.planner.auto import cluster_of, laid_out
    from fivefold.planner.search.planned import planned_alone

    device = torch.cuda.get_device_name() if kind == "cuda" else "cpu"
    if job.layout.auto:
        job, promise = laid_out(job, ranks, kind, device)
        return resolve(job, ranks, kind), promise
    job = resolve(job, ranks, kind)
    return job, planned_alone(Setup.of(job), cluster_of(job, kind, device))


def sentence(promise: Planned) -> str:
    """What a person is told before the first step."""
    memory = float(promise.memory.device) / 2**30
    speed = promise.tokens_per_second
    told = f"planned: {promise.step_time:.3g} s a step, {speed:,.0f} tok/s, {memory:.2f} GiB a rank"
    return told + (f", {promise.host_gib:.2f} of its host's" if promise.host_gib else "")


def keep(promise: Planned, folder: Path) -> None:
    """Leave the figures in the run's folder, to be compared with what is measured."""
    figures = {
        "step_time_s": promise.step_time,
        "tokens_per_s": promise.tokens_per_second,
        "memory_bytes": float(promise.memory.device),
        "allocated_bytes": float(promise.memory.allocated),
    }
    (folder / FILE).write_text(json.dumps(figures, indent=1) + "\n")
