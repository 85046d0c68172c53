"""A layout as keys of a job, and a job split as a layout says."""

from typing import Any

from fivefold.config import Job
from fivefold.ledger.setup import Setup

SETTINGS_OF = {"tp": ("sequence_parallel",), "pp": ("schedule", "virtual_stages"), "cp": ("cp_kind",)}
"""Which keys say how an axis works. They are told where the axis splits anything."""


def layout_keys(setup: Setup) -> dict[str, Any]:
    """The keys of a job's `layout` section that make this layout, with nothing left open."""
    degrees = {key: int(getattr(setup, key)) for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")}
    told = [key for axis, keys in SETTINGS_OF.items() if degrees[axis] > 1 for key in keys]
    return {**degrees, "zero": setup.zero, **{key: getattr(setup, key) for key in told}}


def training_keys(setup: Setup) -> dict[str, Any]:
    return {"micro_batch": int(setup.micro_batch), "recompute": setup.recompute, "compile": setup.compile}


def in_keys(setup: Setup) -> str:
    """A layout in one line, as `--why` takes it: its ZeRO stage, and what differs from 1."""
    keys = {**layout_keys(setup), **training_keys(setup)}
    del keys["compile"]
    keys.pop("sequence_parallel", None)
    told = [f"{key}={value}" for key, value in keys.items() if key == "zero" or value not in (1, "none")]
    return ",".join([*told, *["compiled"] * setup.compile])


def in_words(setup: Setup) -> str:
    """A layout in one short line: `dp_shard 64 (zero 3) x tp 8 x pp 4 (1f1b), micro-batch 2`."""
    keys, turns = layout_keys(setup), f" x{setup.virtual_stages}" if setup.virtual_stages > 1 else ""
    settings = {"dp_shard": f"zero {setup.zero}", "cp": setup.cp_kind, "pp": f"{setup.schedule}{turns}"}
    words = [
        f"{axis} {keys[axis]}" + (f" ({settings[axis]})" if axis in settings else "")
        for axis in ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp")
        if keys[axis] > 1 or (axis == "dp_shard" and setup.zero)
    ]
    line = f"{' x '.join(words) or 'one device'}, micro-batch {setup.micro_batch}"
    line += "" if setup.recompute == "none" else f", recompute {setup.recompute}"
    return line + (", compiled" if setup.compile else "")


def as_job(setup: Setup, job: Job) -> Job:
    """The job, split as the setup says."""
    return job.model_copy(
        update={
            "layout": job.layout.model_copy(update=layout_keys(setup) | {"auto": False}),
            "training": job.training.model_copy(update=training_keys(setup)),
        }
    )
