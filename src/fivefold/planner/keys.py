"""A layout as keys of a job, and a job split as a layout says."""

from __future__ import annotations

from typing import Any

from fivefold.config import Job
from fivefold.ledger.setup import Setup


def layout_keys(setup: Setup) -> dict[str, Any]:
    """The keys of a job's `layout` section that make this layout, with nothing left open."""
    degrees = {key: int(getattr(setup, key)) for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")}
    keys: dict[str, Any] = {**degrees, "zero": setup.zero}
    if degrees["tp"] > 1:
        keys["sequence_parallel"] = setup.sequence_parallel
    if degrees["pp"] > 1:
        keys |= {"schedule": setup.schedule, "virtual_stages": int(setup.virtual_stages)}
    if degrees["cp"] > 1:
        keys["cp_kind"] = setup.cp_kind
    return keys


def training_keys(setup: Setup) -> dict[str, Any]:
    return {"micro_batch": int(setup.micro_batch), "recompute": setup.recompute, "compile": setup.compile}


def in_keys(setup: Setup) -> str:
    """A layout in one line, as `--why` takes it: its ZeRO stage, and what differs from 1."""
    keys = {**layout_keys(setup), **training_keys(setup)}
    del keys["compile"]
    keys.pop("sequence_parallel", None)
    told = [f"{key}={value}" for key, value in keys.items() if key == "zero" or value not in (1, "none")]
    return ",".join([*told, *["compiled"] * setup.compile])


def as_job(setup: Setup, job: Job) -> Job:
    """The job, split as the setup says."""
    return job.model_copy(
        update={
            "layout": job.layout.model_copy(update=layout_keys(setup) | {"auto": False}),
            "training": job.training.model_copy(update=training_keys(setup)),
        }
    )
