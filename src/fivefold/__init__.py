"""Distributed training of transformers: the verbs of the command line, as functions.

    import fivefold

    job = fivefold.load_job(preset="tiny", overrides=["--training.steps", "20"])
    summary = fivefold.train(job, nproc=4)
    verdict = fivefold.verify(job, nproc=4)
    found = fivefold.plan(model="llama3-8b", gpus=64)
    summary = fivefold.train(job, nproc=4, model=OwnModel)    # docs/own-model.md

Names are looked up when first used, so that `import fivefold` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.config import Job as Job
    from fivefold.config import load as load_job
    from fivefold.planner.request import plan as plan
    from fivefold.training.launch import train as train
    from fivefold.verification import verify as verify

__version__ = "0.1.0"
__all__ = ["Job", "load_job", "plan", "train", "verify"]

_PLACES = {
    "Job": ("fivefold.config", "Job"),
    "load_job": ("fivefold.config", "load"),
    "plan": ("fivefold.planner.request", "plan"),
    "train": ("fivefold.training.launch", "train"),
    "verify": ("fivefold.verification", "verify"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fivefold' has no attribute '{name}'")
    module, attribute = _PLACES[name]
    return getattr(import_module(module), attribute)
