"""`verify`: a job's small copy under its layout against one process."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fivefold.axes.checks import check
from fivefold.axes.layout import Layout, described
from fivefold.comm.world import DeviceKind, device_kind
from fivefold.config import Job, with_own_model
from fivefold.problems import BadInput, BadNews, Problem, refuse
from fivefold.training.launch import rank_count
from fivefold.training.promise import planned
from fivefold.training.ranks import run_ranks, stop_if_imported
from fivefold.verification.blame import guilty_axis, on_one_process
from fivefold.verification.compare import InFloat64, Measure, differences
from fivefold.verification.compute import Computed, compute
from fivefold.verification.rounding import InJobPrecision
from fivefold.verification.shrink import ROWS, STEPS, shrink, shrunk
from fivefold.verification.unexercised import not_exercised
from fivefold.verification.verdict import Part, Verdict

Precision = Literal["fp64", "job"]
PRECISIONS = ("fp64", "job")


@dataclass(frozen=True)
class Trial:
    """A job as ranks run it and as one process does, and how the two are compared."""

    job: Job
    alone: Job
    measure: Measure
    device: DeviceKind

    def compared(self, found: Computed, reference: Computed) -> Part:
        name = str(self.job.training.precision)
        return Part(name, self.device, differences(found, reference, self.measure))


def verify(
    job: Job,
    nproc: int | None = None,
    model: Callable[[], torch.nn.Module] | None = None,
    precision: Precision = "fp64",
) -> Verdict:
    """Compare two steps of `job`'s layout with one process. Raises `BadInput` for an impossible job.

    model      a model of your own, by its class: short for `model.module`
    precision  "fp64", or "job": behind the proof in float64, the same in the job's own precision and compiled
               if the job is, on GPUs where there is one for each rank
    """
    stop_if_imported()
    if precision not in PRECISIONS:
        raise BadInput([Problem("--precision", f"'{precision}' is unknown", "Allowed: fp64 or job.")])
    job = with_own_model(job, model)
    ranks = rank_count(job, nproc, "cpu")
    job, _ = planned(job, ranks, device_kind())
    refuse(check(job))
    small = shrink(job)
    trials = [Trial(small, on_one_process(small), InFloat64(), "cpu")]
    if precision == "job":
        trials.append(_in_job_precision(job, small, ranks))
    alone = _alone(trials)
    parts = [
        trial.compared(found, reference)
        for trial, found, reference in zip(trials, _run(trials, ranks), alone, strict=True)
    ]
    axes = (
        guilty_axis(trial.job, _good(trial, reference))
        for trial, reference, part in zip(trials, alone, parts, strict=True)
        if not part.ok
    )
    exact, (of_gradient, of_norm) = parts[0], parts[0].differences[:2]
    return Verdict(
        ok=all(part.ok for part in parts),
        worst_gradient_error=exact.worst_gradient.error,
        worst_parameter=exact.worst_gradient.where,
        parameters=len(alone[0].begin),
        loss=of_gradient.found or 0.0,
        reference_loss=of_gradient.reference or 0.0,
        grad_norm=of_norm.found or 0.0,
        reference_grad_norm=of_norm.reference or 0.0,
        axis=next(axes, None),
        layout=described(job),
        steps=STEPS,
        rows=ROWS,
        parts=parts,
        shrunk=shrunk(job, small),
        not_exercised=not_exercised(job, small, parts, alone[0]),
    )


def _in_job_precision(job: Job, small: Job, ranks: int) -> Trial:
    """The same copy with the job's own precision, states and compilation, on GPUs if there are enough.

    Rounding moves tokens that hardly prefer one expert to another: they are dealt to experts in turn. And it
    turns Muon's steps by any angle where gradients are small in some directions: AdamW stands in.
    """
    device: DeviceKind = "cuda" if ranks <= torch.cuda.device_count() else "cpu"
    training: dict[str, Any] = {"precision": job.training.precision, "compile": job.training.compile}
    if job.training.fp8 != "none":  # the copy's layers are small, and it has few blocks
        training |= {"fp8": job.training.fp8, "fp8_head": job.training.fp8_head, "fp8_small": True}
    communication: dict[str, Any] = {"tp_overlap": job.communication.tp_overlap and device == "cuda"}
    exact = job.training.precision == "fp64"
    if job.spec.experts is not None and not exact:
        training["routing"] = "balanced"
    optimizer = small.optimizer.model_copy(update={"states": job.optimizer.states})
    if optimizer.name == "muon" and not exact:
        optimizer = optimizer.model_copy(update={"name": "adamw", "momentum": None})
    lower = small.model_copy(
        update={
            "optimizer": optimizer,
            "training": small.training.model_copy(update=training),
            "communication": small.communication.model_copy(update=communication),
        }
    )
    return Trial(lower, on_one_process(lower), InFloat64() if exact else InJobPrecision.of(lower), device)


def _alone(trials: list[Trial]) -> list[Computed]:
    """What one process computes in each trial; trials that differ in precision alone share it.

    Raises `BadNews` where its numbers are not finite: there is nothing to compare with.
    """
    jobs: list[Job] = []
    for trial in trials:
        if trial.alone not in jobs:
            jobs.append(trial.alone)
    computed = run_ranks(compute, 1, *jobs)[0]
    for number, step in ((n, step) for each in computed for n, step in enumerate(each.steps, 1)):
        if not math.isfinite(step.loss + step.grad_norm):
            figures = f"the loss is {step.loss}, the gradient norm {step.grad_norm}"
            raise BadNews(f"Nothing to compare with: on one process, in step {number}, {figures}.")
    return [computed[jobs.index(trial.alone)] for trial in trials]


def _run(trials: list[Trial], ranks: int) -> list[Computed]:
    """What ranks compute in each trial. Starting them takes the time: trials on one device share a start."""
    found: dict[int, Computed] = {}
    for device in dict.fromkeys(trial.device for trial in trials):
        here = [index for index, trial in enumerate(trials) if trial.device == device]
        results = run_ranks(compute, ranks, *(trials[index].job for index in here), device=device)[0]
        found |= dict(zip(here, results, strict=True))
    return [found[index] for index in range(len(trials))]


def _good(trial: Trial, reference: Computed) -> Callable[[Job], bool]:
    def good(job: Job) -> bool:
        found = run_ranks(compute, Layout.of(job).ranks, job, device=trial.device)[0][0]
        return trial.compared(found, reference).ok

    return good
