"""Whether a job fits the memory of this machine, before anything starts.

What it needs is the planner's figure. That is an estimate, so a job is refused only where it surely does not
fit, and a person is warned in between: measured over predicted is log-normal, as in all of the planner. Of a
user's own model only weights, gradients and optimizer states are known: it is refused where these do not fit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fivefold.axes.fp8 import in_fp8
from fivefold.axes.layout import Layout, Place
from fivefold.axes.pieces import gradient_bytes, pieces, size_of
from fivefold.comm.world import DeviceKind, launched_world
from fivefold.config.conditions import states_fit
from fivefold.hardware.host_memory import available_memory
from fivefold.ledger.fp8 import is_of_experts
from fivefold.ledger.setup import Setup
from fivefold.models.own.spec import OwnSpec
from fivefold.planner.memory.fullest_rank import GIB, RISK, chance_of, memory_on
from fivefold.planner.memory.our_tensors import on_host, rank_tensors, states
from fivefold.problems import Problem
from fivefold.training.remedies import remedies

if TYPE_CHECKING:
    from fivefold.config import Job

FIRST_WITH_FP8 = (8, 9)
"""The compute capability from which on NVIDIA's GPUs multiply numbers of 8 bits."""
GROUPS_IN_FP8 = ((9, 0), (10, 0))
"""Compute capabilities of GPUs for which torch (2.11 to 2.13) multiplies groups of tokens in 8 bits."""
SURE = 0.999
"""A job is refused that runs out of memory with at least this chance: it needs 1.17 times what is there."""


@dataclass(frozen=True)
class Fit:
    """What a job needs of the memory in one place.

    needed  bytes of the fullest rank on a GPU; of all ranks on this machine together on CPUs
    there   bytes that can be had
    ranks   that share them
    place   which memory it is, in words
    least   activations are not known, and not in `needed`
    """

    needed: float
    there: float
    ranks: int
    place: str
    least: bool = False

    @property
    def chance(self) -> float:
        """Of running out of memory."""
        return float(chance_of(self.needed, max(1.0, self.there)))

    def __str__(self) -> str:
        least = "at least " if self.least else ""
        return f"needs {least}{gib(self.needed)} GiB {self.place}, and {gib(self.there)} GiB are there"


def memory_problems(job: Job, kind: DeviceKind) -> list[Problem]:
    """Why a resolved job surely does not fit this machine, and what would help; empty where it may."""
    return _refused(job, kind, _fit(job, kind))


def host_problems(job: Job, kind: DeviceKind) -> list[Problem]:
    """Why this machine's own memory has no room for what `optimizer.offload` puts there beside GPUs.

    A checkpoint that is written while training goes on is written from a copy of it.
    """
    if not job.optimizer.offload or kind == "cpu":
        return []
    copied, ranks = bool(job.checkpoint.keep and job.checkpoint.async_), _ranks_here(job)
    states, there = offloaded_bytes(job) * ranks, available_memory()
    needed = states * (1 + copied)
    if needed <= there:
        return []
    whose = "its rank" if ranks == 1 else f"its {ranks} ranks"
    message = f"true needs {gib(needed)} GiB of this machine's own memory for {whose}"
    message += ", half of it for the copy of which checkpoints are written" if copied else ""
    helps = [f"checkpoint.async = false ({gib(states)} GiB)"] if copied else []
    if job.optimizer.states == "fp32" and states_fit("bf16", job.optimizer.name, job.training.precision):
        narrow = job.optimizer.model_copy(update={"states": "bf16"})
        less = offloaded_bytes(job.model_copy(update={"optimizer": narrow})) * ranks * (1 + copied)
        helps.append(f"optimizer.states = 'bf16' ({gib(less)} GiB)")
    hint = f"What helps: {', '.join([*helps, 'more memory'])}; or leave it out. To try all the same: --force."
    return [Problem("optimizer.offload", f"{message}, and {gib(there)} GiB are there", hint)]


def offloaded_bytes(job: Job) -> float:
    """Bytes of the host's memory that optimizer states of one rank take, on average."""
    setup, layout = Setup.of(job), Layout.of(job)
    places = [Place(pp=position) for position in range(int(setup.pp))]
    sizes = [size_of(pieces(job, place), layout, place) for place in places]
    return sum(float(on_host(setup, size)) for size in sizes) / len(sizes)


def fp8_problems(job: Job, kind: DeviceKind) -> list[Problem]:
    """Why this machine's GPUs cannot compute in 8 bits, where the job does; a CPU emulates it."""
    if job.training.fp8 == "none" or kind == "cpu":
        return []
    devices = [torch.cuda.get_device_properties(device) for device in range(torch.cuda.device_count())]
    experts = any(is_of_experts(what) for what in in_fp8(Setup.of(job)))
    for device in devices:
        if torch.version.hip is not None or (device.major, device.minor) < FIRST_WITH_FP8:
            message = f"'{job.training.fp8}': a {device.name} does not compute in 8 bits"
            hint = "Leave it out, or use GPUs that do: NVIDIA's Hopper, Blackwell or Ada."
            return [Problem("training.fp8", message, hint)]
        if experts and (device.major, device.minor) not in GROUPS_IN_FP8:
            message = (
                f"'{job.training.fp8}' with model.experts: a {device.name} has no kernel for such products"
            )
            hint = "Leave it out, or use NVIDIA's H100, H200, B100 or B200."
            return [Problem("training.fp8", message, hint)]
    return []


def device_problems(job: Job, device: torch.device) -> list[Problem]:
    """The same of this rank's own GPU, as it is now: other programs may have memory of it."""
    if device.type != "cuda":
        return []
    free, total = torch.cuda.mem_get_info(device)
    fit = fit_on_gpu(job, free, f"of GPU {device.index} ({gib(total)} GiB, some of it in use)", started=True)
    return _refused(job, "cuda", fit)


def memory_warning(job: Job, kind: DeviceKind) -> str | None:
    """What to tell of a job that may run out of memory; None where it can be counted on to fit."""
    fit = _fit(job, kind)
    if fit.chance <= RISK:
        return None
    return f"memory: {job.spec.name} {fit}: it may run out (chance {fit.chance:.0%}, by the planner's figure)"


def _refused(job: Job, kind: DeviceKind, fit: Fit) -> list[Problem]:
    if fit.chance < SURE:
        return []
    helps = remedies(job, kind, fit.needed / fit.ranks, fit.there / fit.ranks)
    return [Problem("memory", f"{job.spec.name} {fit}", f"{helps} To try all the same: --force.")]


def _fit(job: Job, kind: DeviceKind) -> Fit:
    if kind == "cpu":
        return fit_on_host(job, available_memory(), _ranks_here(job))
    devices = range(torch.cuda.device_count())
    smallest = min(torch.cuda.get_device_properties(device).total_memory for device in devices)
    return fit_on_gpu(job, smallest, "on each GPU")


def fit_on_host(job: Job, there: float, ranks: int) -> Fit:
    """All of the `ranks` on this machine together against its memory. (Those of a pipeline differ.)"""
    setup = Setup.of(job)
    each = [_host_rank(job, setup, position) for position in range(int(setup.pp))]
    place = "of memory on this machine" if ranks == 1 else f"of memory on this machine for its {ranks} ranks"
    return Fit(sum(each) / len(each) * ranks, there, ranks, place, isinstance(job.spec, OwnSpec))


def fit_on_gpu(job: Job, there: float, place: str, started: bool = False) -> Fit:
    """The fullest rank against the memory of one GPU; one that has `started` has its context already."""
    setup = Setup.of(job)
    if isinstance(job.spec, OwnSpec):
        needed = max(held(job, setup, position) for position in range(int(setup.pp)))
        return Fit(needed, there, 1, place, least=True)
    memory = memory_on(setup, "cuda")
    return Fit(float(memory.reserved if started else memory.device), there, 1, place)


def _host_rank(job: Job, setup: Setup, position: int) -> float:
    if isinstance(job.spec, OwnSpec):
        return held(job, setup, position) + offloaded_bytes(job)
    return float(rank_tensors(setup, position, "cpu").device)


def held(job: Job, setup: Setup, position: int) -> float:
    """Bytes on its device of weights, gradients and optimizer states of a rank of the pipeline, at rest."""
    place = Place(pp=position)
    size = size_of(pieces(job, place), Layout.of(job), place)
    if setup.zero:
        return float(size.updated * setup.precision.reduce_bytes + states(setup, size))
    weights = size.whole * setup.precision.compute_bytes
    return float(weights + gradient_bytes(setup, size) + states(setup, size))


def _ranks_here(job: Job) -> int:
    """How many of the job's ranks run on this machine; where a launcher does not say, at least this one."""
    if launched_world() is None:
        return int(Setup.of(job).ranks)
    told = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(told) if told.isdecimal() else 1


def gib(size: float) -> str:
    """`6,048`, `21.2` or `0.35`: bytes as GiB, as exact as a person needs."""
    number = size / GIB
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 1 else f"{number:.2f}"
