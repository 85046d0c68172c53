"""What would make a job fit into memory: the best layout that fits, or what the leanest one needs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fivefold.config.complain import shown
from fivefold.config.conditions import narrower_states
from fivefold.hardware.cluster import Cluster
from fivefold.hardware.host_memory import available_memory
from fivefold.ledger.setup import Setup
from fivefold.models.own.spec import OwnSpec
from fivefold.planner.answer import Answer
from fivefold.planner.auto import cluster_of
from fivefold.planner.goal import Goal, goal_of, may_offload
from fivefold.planner.keys import as_sections
from fivefold.planner.memory.fullest_rank import GIB, UNUSABLE
from fivefold.planner.search.planned import Planned
from fivefold.problems import BadInput

if TYPE_CHECKING:
    from fivefold.comm.world import DeviceKind
    from fivefold.config import Job

CHUNK = 1024
"""Tokens whose logits the loss has at a time, where all do not fit. Products of as many rows lose little."""
USUAL = (
    "What helps: more ranks under layout.zero = 3, a smaller training.micro_batch, "
    "training.recompute = 'full'."
)


def remedies(job: Job, kind: DeviceKind, needed: float, share: float) -> str:
    """What to change, in a sentence or two.

    needed, share  bytes that one rank needs now, and that it can have
    """
    cluster = _these_devices(job, kind, share)
    if cluster is None or isinstance(job.spec, OwnSpec):
        return USUAL
    ranks = int(Setup.of(job).ranks)
    goal = goal_of(job, ranks, kind)
    found = Answer(goal, cluster).best_with({})
    best = next(iter(found.best), None) or _with_less(goal, cluster, kind)
    if best is not None:
        return f"This fits: {_changes(job, best.setup)} ({best.memory_gib:.1f} GiB a rank)."
    if found.nearest is None:
        return USUAL
    leanest = min(found.nearest.memory_gib * GIB, needed)
    more = math.ceil(leanest / share) * (ranks if kind == "cuda" else 1)
    things = "GPUs" if kind == "cuda" else "machines"
    return (
        f"No layout of {ranks} rank{'s' if ranks > 1 else ''} fits: the leanest needs "
        f"{leanest / GIB:,.1f} GiB a rank. About {more:,} {things} like this would do; "
        "`fivefold plan` says what fits."
    )


def _with_less(goal: Goal, cluster: Cluster, kind: DeviceKind) -> Planned | None:
    """What fits where no layout does: the logits may be too large, or the optimizer's states, which may take
    fewer bits or lie in this host's memory.
    """
    setup = goal.setup
    narrower = narrower_states(setup.states, setup.optimizer, setup.precision.name)
    heads = [goal] if setup.loss_chunk else [goal, goal.changed(loss_chunk=CHUNK)]
    tried = [head.changed(states=states) for states in (setup.states, *narrower) for head in heads]
    if may_offload(goal, kind):
        tried += [head.changed(offload=True) for head in heads]
    for each in tried[1:]:
        best = next(iter(Answer(each, cluster).best_with({}).best), None)
        if best is not None and float(best.memory.host) * goal.gpus <= available_memory():
            return best
    return None


def _these_devices(job: Job, kind: DeviceKind, share: float) -> Cluster | None:
    """A cluster of devices like those here, with the memory that a rank can have; None of unknown ones."""
    here = job.model_copy(update={"cluster": type(job.cluster)()})
    try:
        cluster = cluster_of(here, kind, torch.cuda.get_device_name() if kind == "cuda" else "cpu")
    except BadInput:
        return None
    room = share / GIB / (1.0 if kind == "cpu" else 1 - UNUSABLE)
    return replace(cluster, device=replace(cluster.device, memory_gib=room))


def _changes(job: Job, fitting: Setup) -> str:
    """The keys in which a layout differs from the job's."""
    mine, theirs = (_sections(setup) for setup in (Setup.of(job), fitting))
    return ", ".join(
        f"{section}.{key} = {shown(value)}"
        for section, keys in theirs.items()
        for key, value in keys.items()
        if mine.get(section, {}).get(key) != value
    )


def _sections(setup: Setup) -> dict[str, dict[str, Any]]:
    """As the planner's, with the states, which it takes as they are."""
    sections = as_sections(setup)
    return {**sections, "optimizer": {**sections.get("optimizer", {}), "states": setup.states}}
