"""What does not go together in a job whose layers compute in 8 bits (`training.fp8`).

Conditions on shapes and the layout stand in `axes/fp8.py`; these are about the rest of the job.
"""

from __future__ import annotations

from fivefold.config.complain import shown
from fivefold.config.schema import Job
from fivefold.models.own.spec import OwnSpec
from fivefold.models.spec import ModelSpec
from fivefold.problems import Problem

SETTINGS = ("fp8_first", "fp8_last", "fp8_head", "fp8_small")
WITHOUT = {"fp8": "none", "fp8_first": 0, "fp8_last": 0, "fp8_head": False, "fp8_small": False}
"""Settings of a job that computes in 16 bits or more."""


def problems(job: Job, spec: ModelSpec) -> list[Problem]:
    """Why a job cannot compute in 8 bits as it says."""
    training = job.training
    if training.fp8 == "none":
        hint = "Set training.fp8, or leave it out."
        return [
            Problem(f"training.{key}", f"{shown(value)} without training.fp8", hint)
            for key in SETTINGS
            if (value := getattr(training, key))
        ]
    asked, found = shown(training.fp8), []
    if training.precision not in (None, "bf16"):
        message = f"{asked} with training.precision = {shown(training.precision)}: all else is in bf16 then"
        hint = "Set training.precision = 'bf16', or leave one of the two out."
        found.append(Problem("training.fp8", message, hint))
    if isinstance(spec, OwnSpec):
        message = f"{asked} with model.module: which of its layers are linear is not known"
        found.append(Problem("training.fp8", message, "Leave it out."))
    elif (kept := training.fp8_first + training.fp8_last) >= spec.layers:
        key = "training.fp8_first" if training.fp8_first else "training.fp8_last"
        message = f"with fp8_first and fp8_last {kept} blocks stay in bf16, and the model has {spec.layers}"
        found.append(Problem(key, message, f"Use fewer than {spec.layers} together."))
    if training.fp8_head and training.loss_chunk:
        message = "true with training.loss_chunk: the products of its chunks are in bf16"
        found.append(Problem("training.fp8_head", message, "Leave out one of the two."))
    if job.communication.tp_overlap:
        message = "true with training.fp8: the operators that hide messages multiply in bf16"
        found.append(Problem("communication.tp_overlap", message, "Leave out one of the two."))
    return found
