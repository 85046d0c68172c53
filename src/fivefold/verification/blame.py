"""Which axis is at fault: the axes are turned off one at a time, with the same batch."""

import math
from collections.abc import Callable

from fivefold.axes.checks import check
from fivefold.axes.layout import MESH_ORDER, Layout
from fivefold.comm.world import DeviceKind
from fivefold.config import Job, fp8, resolve
from fivefold.ledger.numbers import divisors

Good = Callable[[Job], bool]
"""Runs a job; whether it computes what one process computes."""


def guilty_axis(job: Job, good: Good) -> str:
    """The axis without which the numbers come right is to blame."""
    used = degrees_used(Layout.of(job))
    if not good(with_degrees(job, {})):
        causes = "precision, compilation, recomputation, loss chunks or micro-batches"
        return f"none: one process alone differs, by {causes}"
    if len(used) < 2:
        return next(iter(used), "none: one process differs from itself")
    guilty = [axis for axis in used if good(with_degrees(job, {**used, axis: 1}))]
    if "ep" in guilty:
        # Without the ranks that experts are spread over there is no ep either: that says nothing more.
        guilty = [axis for axis in guilty if axis not in ("dp_shard", "cp")]
    return " with ".join(guilty) or "more than one of " + ", ".join(used)


def degrees_used(layout: Layout) -> dict[str, int]:
    """The axes that split anything and into how many."""
    return {axis: getattr(layout, axis) for axis in (*MESH_ORDER, "ep") if getattr(layout, axis) > 1}


def with_degrees(job: Job, degrees: dict[str, int]) -> Job:
    """The same training with other degrees (1 where none is given): the batch stays, its split follows.

    What an axis that is turned off had settings for goes with it. Experts stay spread as far as the ranks
    that are left allow. Micro-batches keep their size, or have the nearest that the schedule takes.
    """
    given = dict.fromkeys((*MESH_ORDER, "ep"), 1) | degrees
    given["ep"] = math.gcd(given["ep"], given["dp_shard"] * given["cp"])
    old = job.layout
    zero = old.zero if given["dp_shard"] * given["cp"] > 1 else 0
    layout = old.model_copy(
        update={
            **given,
            "zero": zero,
            "reduce": old.reduce if zero and zero > 1 else "auto",
            "schedule": old.schedule if given["pp"] > 1 else None,
            "virtual_stages": old.virtual_stages if given["pp"] > 1 else None,
            "cp_kind": old.cp_kind if given["cp"] > 1 else None,
        }
    )
    communication = job.communication
    if given["tp"] == 1:
        communication = communication.model_copy(update={"tp_overlap": False})
    job = job.model_copy(update={"layout": layout, "communication": communication})
    ranks = math.prod(given[axis] for axis in MESH_ORDER)
    share = job.training.global_batch // (given["dp_replicate"] * given["dp_shard"])
    sizes = sorted(divisors(share), key=lambda size: abs(size - (job.training.micro_batch or 1)))
    kind: DeviceKind = "cuda" if communication.tp_overlap else "cpu"
    jobs = (resolve(with_micro_batch(job, size), ranks, kind) for size in sizes)
    return next(each for each in jobs if not check(each))


def with_micro_batch(job: Job, size: int) -> Job:
    return job.model_copy(update={"training": job.training.model_copy(update={"micro_batch": size})})


def on_one_process(job: Job) -> Job:
    """The same training in float64 without any split: all of the batch at once, nothing computed again."""
    training = job.training.model_copy(
        update={
            "micro_batch": job.training.global_batch,
            "recompute": "none",
            "precision": "fp64",
            "compile": False,
            "loss_chunk": 0,
            **fp8.WITHOUT,
        }
    )
    optimizer = job.optimizer.model_copy(update={"states": "fp32", "offload": False})
    return with_degrees(job, {}).model_copy(update={"training": training, "optimizer": optimizer})
