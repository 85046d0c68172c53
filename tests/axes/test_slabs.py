"""Where a rank's part of a parameter lies: as planned, and as its tensors say, where two axes cut."""

from __future__ import annotations

from typing import Any

from fivefold.axes.runtime.data_split import local_slab
from fivefold.axes.slabs import slabs
from fivefold.config import Job
from tests.cases import Case, built_on_cpu
from tests.ranks import on_ranks


def both(world: Any, job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    built = built_on_cpu(job)
    named = zip(built.weights.names, built.weights.parameters, strict=True)
    return slabs(job, built.mesh.place), {name: local_slab(parameter) for name, parameter in named}


def test_slabs_are_those_of_live_tensors() -> None:
    job = Case("slabs", 4, {"tp": 2, "dp_shard": 2, "zero": 3}, {"micro_batch": 2}).job()
    for planned, live in on_ranks(both, 4, job):
        assert planned == live
