"""Memory under any software stack, ours included, with the constants that ship."""

from __future__ import annotations

from fivefold.backtest.described_memory import memory_of
from fivefold.backtest.stacks import memory_constants
from fivefold.hardware.cluster import Cluster
from fivefold.ledger.setup import Setup
from fivefold.planner.memory.fullest_rank import Memory, memory
from fivefold.planner.time.stack import LEDGER, Stack


def memory_under(setup: Setup, cluster: Cluster, stack: Stack) -> Memory:
    if stack.memory == LEDGER:
        return memory(setup, cluster)
    return memory_of(setup, stack, memory_constants(cluster.device.name, stack.memory))
