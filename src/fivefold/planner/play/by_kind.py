"""A step's time by what it goes to: kinds of work, messages, and waiting. What a profile is held against."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fivefold.ledger.work import Work
from fivefold.planner.play.step_time import breakdown, exposed_on, on_rank
from fivefold.planner.play.timed import orders_of
from fivefold.planner.time.parts import Costs, device_times


@dataclass(frozen=True)
class ByKind:
    """Seconds of one step of ONE layout, on one rank of its pipeline.

    rank       which
    kinds      of the device's work: "products", "attention", "norms" (and what else is bound by memory),
               "loss"; of the "optimizer"; of "messages" that nothing hides; "idle": the pipeline's bubble,
               and what the host takes to start kernels beyond their own time. Their sum is the step
    step_time  all of it
    """

    rank: int
    kinds: dict[str, float]
    step_time: float


def by_kind(costs: Costs, rank: int = 0) -> ByKind:
    """Where the time of a step goes on a rank of the pipeline; without a pipeline there is rank 0 alone."""
    [order], took = orders_of(costs), breakdown(costs)
    parts, count = on_rank(order, rank), float(costs.setup.micro_batches)
    found: dict[str, float] = defaultdict(float)
    for number, (work, again) in zip(parts, costs.work.values(), strict=True):
        for item, seconds in (*device_times(costs, work), *device_times(costs, again)):
            found[kind_of(item)] += count * number * float(seconds)
    found["optimizer"] = took.optimizer
    waits = sum(exposed_on(parts, costs).values())
    found["messages"] = count * waits + took.exposed["pp"] + took.exposed["dp"]
    found["idle"] = took.step_time - sum(found.values())
    return ByKind(rank, dict(found), took.step_time)


def kind_of(item: Work) -> str:
    """What the time of an operation counts as."""
    if item.kind == "memory":
        return "loss" if item.what == "loss" else "norms"
    return "attention" if item.kind == "attention" else "products"
