"""What a search says about a goal: which layout, how much memory, how long, how much money.

And how few devices make a deadline.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any

from fivefold.hardware.cluster import Cluster
from fivefold.ledger.numbers import divisors
from fivefold.models.flops import flops_per_token
from fivefold.planner.goal import Goal
from fivefold.planner.keys import Given, as_sections
from fivefold.planner.memory.fullest_rank import chance_of_running_out
from fivefold.planner.search.best import SearchResult, search
from fivefold.planner.search.candidates import Choices
from fivefold.planner.search.planned import Planned

MFU_CONVENTION = "model FLOPs with causal attention, without recomputation, over the dense peak"
DAY = 86_400.0
SHOWN = 6
"""How many layouts are in the answer."""
MOST_SERVERS = 2**14
STEPS = 16


@dataclass(frozen=True)
class Answer:
    """The best layouts for a goal on a cluster, and what is to be made of them.

    tokens  to be trained on in all; None where only a step is of interest
    price   of one device for one hour; None where money is of no interest
    fixed   keys that all layouts have, since they were asked for
    """

    goal: Goal
    cluster: Cluster
    tokens: float | None = None
    price: float | None = None
    fixed: Given = field(default_factory=dict)

    @cached_property
    def searched(self) -> SearchResult:
        return self.best_with({}, SHOWN)

    def best_with(self, given: Given, best: int = 1) -> SearchResult:
        """The best layouts that have the given keys beside the fixed ones."""
        given = {**self.fixed, **given}
        chosen = {choice.name: (given[choice.name],) for choice in fields(Choices) if choice.name in given}
        return search(self.goal, self.cluster, Choices(**chosen, given=given), best)

    @property
    def best(self) -> Planned | None:
        return self.searched.best[0] if self.searched.best else None

    def mfu(self, step_time: float) -> float | None:
        """The model's FLOPs as a fraction of the devices' dense peak; None where no peak is known."""
        setup = self.goal.setup
        peak = self.cluster.device.peak_flops.get(setup.precision.compute)
        if peak is None:
            return None
        flops = flops_per_token(setup.spec, setup.seq_len, "causal").model * self.goal.tokens
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
            **as_sections(planned.setup),
            "step_time_s": seconds,
            "tokens_per_s_per_gpu": planned.tokens_per_second / self.goal.gpus,
            "mfu": self.mfu(seconds),
            "memory_gib": planned.memory_gib,
            **({"host_gib": planned.host_gib} if planned.setup.offload else {}),
            "chance_of_running_out": float(chance_of_running_out(planned.memory, self.cluster)),
            "days": self.days(seconds),
            "cost": self.cost(seconds),
        }

    def as_json(self) -> dict[str, Any]:
        setup = self.goal.setup
        return {
            "model": setup.spec.name,
            "cluster": self.cluster.name,
            "gpus": self.goal.gpus,
            "seq_len": setup.seq_len,
            "global_batch": setup.global_batch,
            "precision": setup.precision.name,
            "mfu_convention": MFU_CONVENTION,
            "best": [self.row(planned) | {"breakdown": parts(planned)} for planned in self.searched.best],
            "pareto": [self.row(planned) for planned in self.searched.front],
            "searched": self.searched.bounded,
            "played": self.searched.played,
            "pruned": self.searched.bounded - self.searched.played,
            "seconds": self.searched.seconds,
        }


def parts(planned: Planned) -> dict[str, Any]:
    """Where the time of a layout's step goes: seconds that add up to the step's."""
    names = ("compute", "bubble", "optimizer", "exposed")
    return {f"{name}_s": getattr(planned.breakdown, name) for name in names}


def counts(server: int) -> list[int]:
    """Device counts worth asking for: one to all of a server, then servers in numbers that split well."""
    servers = [count for count in range(1, MOST_SERVERS + 1) if count // (count & -count) in (1, 3, 5)]
    return sorted({*divisors(server), *(server * count for count in servers)})


def steps_between(few: int, many: int, server: int) -> list[int]:
    """Whole servers between two numbers of devices, not more than `STEPS` of them."""
    step = server * max(1, (many - few) // server // STEPS)
    return list(range(few // server * server + step, many, step))


def fewest(cluster: Cluster, answer_for: Callable[[int], Answer], late: Callable[[Answer], Any]) -> Answer:
    """The answer with the fewest devices that is not late; the largest tried where all are.

    More devices take less time, or the same, but for numbers that split badly: so halving the range finds the
    first that does, and halving what lies below it some whole servers less.
    """
    answered = cache(answer_for)
    possible = [count for count in counts(cluster.server) if cluster.has(count)]

    def makes_it(gpus: int) -> bool:
        return answered(gpus).best is not None and not late(answered(gpus))

    place = bisect_left(possible, True, key=makes_it)
    gpus = possible[min(place, len(possible) - 1)]
    if 0 < place < len(possible):
        nearer = [*steps_between(possible[place - 1], gpus, cluster.server), gpus]
        gpus = nearer[bisect_left(nearer, True, hi=len(nearer) - 1, key=makes_it)]
    return answered(gpus)
