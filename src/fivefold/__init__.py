"""Distributed training of transformers: the verbs of the command line, as functions.

    import fivefold

    plan = fivefold.plan("llama3-8b", gpus=64, tokens="1T")
    job = fivefold.job("tiny", training={"steps": 20})
    verdict = fivefold.verify(job, nproc=2)
    summary = fivefold.train(job, nproc=2)
    metrics = fivefold.read_metrics(summary.folder)
    fivefold.train(job, nproc=4, model=OwnModel)    # docs/own-model.md

docs/python.md shows each. Names are looked up when first used, so that `import fivefold` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fivefold.threads import wait_asleep
from fivefold.version import __version__ as __version__

if TYPE_CHECKING:
    from fivefold.api.jobs import job as job
    from fivefold.api.metrics import Metric as Metric
    from fivefold.api.metrics import Metrics as Metrics
    from fivefold.api.metrics import read_metrics as read_metrics
    from fivefold.api.planning import Plan as Plan
    from fivefold.api.planning import plan as plan
    from fivefold.api.runs import train as train
    from fivefold.api.runs import verify as verify
    from fivefold.api.simulation import Simulation as Simulation
    from fivefold.api.simulation import simulate as simulate
    from fivefold.config import Job as Job
    from fivefold.config import load as load_job
    from fivefold.problems import BadInput as BadInput
    from fivefold.problems import BadNews as BadNews
    from fivefold.training.failures import RanksFailed as RanksFailed
    from fivefold.training.run import Summary as Summary
    from fivefold.verification import Verdict as Verdict

wait_asleep()  # before anything here imports torch

__all__ = [
    "BadInput",
    "BadNews",
    "Job",
    "Metric",
    "Metrics",
    "Plan",
    "RanksFailed",
    "Simulation",
    "Summary",
    "Verdict",
    "job",
    "load_job",
    "plan",
    "read_metrics",
    "simulate",
    "train",
    "verify",
]

_PLACES = {
    "BadInput": "fivefold.problems",
    "BadNews": "fivefold.problems",
    "Job": "fivefold.config",
    "Metric": "fivefold.api.metrics",
    "Metrics": "fivefold.api.metrics",
    "Plan": "fivefold.api.planning",
    "RanksFailed": "fivefold.training.failures",
    "Simulation": "fivefold.api.simulation",
    "Summary": "fivefold.training.run",
    "Verdict": "fivefold.verification",
    "job": "fivefold.api.jobs",
    "load_job": "fivefold.config:load",
    "plan": "fivefold.api.planning",
    "read_metrics": "fivefold.api.metrics",
    "simulate": "fivefold.api.simulation",
    "train": "fivefold.api.runs",
    "verify": "fivefold.api.runs",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fivefold' has no attribute '{name}'")
    module, _, attribute = _PLACES[name].partition(":")
    return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
