"""The verb `plan`: which layout, how much memory, how long, how much money."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fivefold.config import Job
from fivefold.hardware.cluster import Cluster
from fivefold.ledger.setup import Setup
from fivefold.models.flops import flops_per_token
from fivefold.planner.goal import Goal
from fivefold.planner.memory import chance_of_running_out
from fivefold.planner.search import GIB, Found, Planned, search

MFU_CONVENTION = "model FLOPs with causal attention, without recomputation, over the dense peak"
DAY = 86_400.0


@dataclass(frozen=True)
class Plan:
    """The layouts that were found for a goal, and what is to be made of them.

    tokens  to be trained on in all; None where only a step is of interest
    price   of one device for one hour; None where money is of no interest
    """

    goal: Goal
    cluster: Cluster
    found: Found
    tokens: float | None = None
    price: float | None = None

    @property
    def best(self) -> Planned | None:
        return self.found.best[0] if self.found.best else None

    def mfu(self, step_time: float) -> float | None:
        """The model's FLOPs as a fraction of the devices' dense peak; None where no peak is known."""
        peak = self.cluster.device.peak_flops.get(self.goal.precision.compute)
        if peak is None:
            return None
        flops = flops_per_token(self.goal.spec, self.goal.seq_len, "causal").model * self.goal.tokens
        return flops / (step_time * peak * self.goal.gpus)

    def days(self, step_time: float) -> float | None:
        return None if self.tokens is None else self.tokens / self.goal.tokens * step_time / DAY

    def cost(self, step_time: float) -> float | None:
        days = self.days(step_time)
        return None if days is None or self.price is None else days * 24 * self.goal.gpus * self.price

    def row(self, planned: Planned) -> dict[str, Any]:
        """One layout as plain values; `layout` and `training` hold a job's own keys."""
        seconds = planned.step_time
        return {
            "layout": layout_keys(planned.setup),
            "training": training_keys(planned.setup),
            "step_time_s": seconds,
            "tokens_per_s_per_gpu": planned.tokens_per_second / self.goal.gpus,
            "mfu": self.mfu(seconds),
            "memory_gib": float(planned.memory.device) / GIB,
            "chance_of_running_out": float(chance_of_running_out(planned.memory, self.cluster)),
            "days": self.days(seconds),
            "cost": self.cost(seconds),
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.goal.spec.name,
            "cluster": self.cluster.name,
            "gpus": self.goal.gpus,
            "seq_len": self.goal.seq_len,
            "global_batch": self.goal.global_batch,
            "precision": self.goal.precision.name,
            "mfu_convention": MFU_CONVENTION,
            "best": [self.row(planned) for planned in self.found.best],
            "pareto": [self.row(planned) for planned in self.found.front],
            "searched": self.found.searched,
            "pruned": self.found.pruned,
            "seconds": self.found.seconds,
        }


def plan(goal: Goal, cluster: Cluster, tokens: float | None = None, price: float | None = None) -> Plan:
    """The best layouts for a goal on a cluster, and what training on `tokens` tokens takes."""
    return Plan(goal, cluster, search(goal, cluster), tokens, cluster.price if price is None else price)


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


def in_keys(planned: Planned) -> str:
    """A layout in one line, as `--why` takes it: its ZeRO stage, and what differs from 1."""
    keys = {**layout_keys(planned.setup), **training_keys(planned.setup)}
    del keys["compile"]
    keys.pop("sequence_parallel", None)
    told = [f"{key}={value}" for key, value in keys.items() if key == "zero" or value not in (1, "none")]
    return ",".join([*told, *["compiled"] * planned.setup.compile])


def as_job(setup: Setup, job: Job) -> Job:
    """The job, split as the setup says."""
    return job.model_copy(
        update={
            "layout": job.layout.model_copy(update=layout_keys(setup) | {"auto": False}),
            "training": job.training.model_copy(update=training_keys(setup)),
        }
    )
