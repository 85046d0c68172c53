"""One layout, and what it will take."""

from dataclasses import dataclass
from functools import cached_property

from fivefold.hardware.cluster import Cluster
from fivefold.ledger.setup import Setup
from fivefold.planner.keys import in_keys
from fivefold.planner.memory.fullest_rank import GIB, Memory, memory
from fivefold.planner.play.step_time import Breakdown, breakdown, step_times
from fivefold.planner.time.parts import Costs

Degrees = tuple[int, ...]
DEGREES = ("data_ranks", "cp", "tp", "pp", "ep")


@dataclass(frozen=True, repr=False)
class Planned:
    """One layout, and what it will take: its step and its memory, both played."""

    setup: Setup
    memory: Memory
    cluster: Cluster
    step_time: float

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where the time of a step goes."""
        return breakdown(Costs.of(self.setup, self.cluster))

    @property
    def degrees(self) -> Degrees:
        return tuple(int(getattr(self.setup, name)) for name in DEGREES)

    @property
    def tokens_per_second(self) -> float:
        return self.setup.global_batch * self.setup.seq_len / self.step_time

    @property
    def memory_gib(self) -> float:
        """Of the fullest device."""
        return float(self.memory.device) / GIB

    @property
    def host_gib(self) -> float:
        """Of a host's memory, for the fullest device."""
        return float(self.memory.host) / GIB

    @property
    def keys(self) -> str:
        """The layout in one line: `zero=3,dp_shard=8,micro_batch=2`."""
        return in_keys(self.setup)

    @property
    def brief(self) -> str:
        told = f"{self.step_time:.4g} s a step, {self.memory_gib:.1f} GiB"
        return told + (f", {self.host_gib:.1f} GiB of the host's" if self.host_gib else "")

    def __repr__(self) -> str:
        return f"<{self.keys}: {self.brief}>"


def planned_alone(setup: Setup, cluster: Cluster) -> Planned:
    """What ONE layout takes."""
    [[seconds]] = step_times([Costs.of(setup, cluster)])
    return Planned(setup, memory(setup, cluster), cluster, float(seconds))
